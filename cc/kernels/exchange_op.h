// The ops of tf_smb as TensorFlow knows them: names, inputs, outputs, shapes.
#ifndef TF_SMB_CC_KERNELS_EXCHANGE_OP_H_
#define TF_SMB_CC_KERNELS_EXCHANGE_OP_H_

namespace tf_smb {

constexpr char kExchangeOpName[] = "TfSmbExchange";

// TfSmbExchange(handle: int64, steps: int64, local: T) -> (outcome: int32, delta: T)
//   T: list of float32. handle: a number of segment_registry.h. outcome: an
//   ExchangeOutcome. delta: what to subtract from each local; to be used only when
//   outcome is kMoved (else it is `local` itself, passed through).
void RegisterExchangeOp();
void RegisterExchangeKernel();

}  // namespace tf_smb

#endif  // TF_SMB_CC_KERNELS_EXCHANGE_OP_H_
