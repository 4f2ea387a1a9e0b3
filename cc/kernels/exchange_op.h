// The ops of tf_smb as TensorFlow knows them: names, inputs, outputs, shapes.
#ifndef TF_SMB_CC_KERNELS_EXCHANGE_OP_H_
#define TF_SMB_CC_KERNELS_EXCHANGE_OP_H_

namespace tf_smb {

constexpr char kExchangeOpName[] = "TfSmbExchange";
constexpr char kIsDueOpName[] = "TfSmbIsDue";

// TfSmbExchange(handle: int64, steps: int64, batches: int64, local: T)
//     -> (outcome: int32, delta: T)
//   T: list of float dtypes. handle: a number of segment_registry.h. steps, batches: this
//   worker's, in all. outcome: an ExchangeOutcome. delta: if it is kMoved, what to subtract
//   from each local; if it is kReplaced, what to set it to; else `local` itself, passed
//   through, and not to be used.
// TfSmbIsDue(handle: int64, steps: int64, batches: int64) -> (due: bool)
//   Whether an exchange is due, by the segment's schedule.
void RegisterExchangeOps();
void RegisterExchangeKernels();

}  // namespace tf_smb

#endif  // TF_SMB_CC_KERNELS_EXCHANGE_OP_H_
