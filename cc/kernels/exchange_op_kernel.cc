// The CPU kernels of the ops. On other devices TensorFlow places them on the host and
// copies.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cc/client/attached_segment.h"
#include "cc/client/segment_registry.h"
#include "cc/kernels/exchange_op.h"
#include "cc/kernels/interrupt.h"
#include "cc/kernels/output_pool.h"
#include "cc/kernels/tf_status.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/tf_tensor.h"

namespace tf_smb {
namespace {

constexpr int kHandleInput = 0;
constexpr int kStepsInput = 1;
constexpr int kBatchesInput = 2;
constexpr int kFirstLocalInput = 3;
constexpr int kFirstOutput = 0;
constexpr int kFirstDeltaOutput = 1;

struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, TensorDeleter>;

Tensor GetInput(TF_OpKernelContext* context, int index, TF_Status* status) {
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status);
  return Tensor(tensor);
}

Result<int64_t> GetInt64(TF_OpKernelContext* context, int index, TF_Status* status) {
  const Tensor tensor = GetInput(context, index, status);
  TF_SMB_RETURN_IF_ERROR(FromTensorFlow(status));
  if (TF_TensorElementCount(tensor.get()) != 1) {
    return InvalidArgumentError("input " + std::to_string(index) + " must be a scalar [SMB-E230]");
  }
  return *static_cast<const int64_t*>(TF_TensorData(tensor.get()));
}

void ReleaseBlock(void* data, size_t, void*) { GlobalOutputPool().Release(data); }

// A tensor of `like`'s shape on recycled memory.
Tensor NewPooledTensor(const TF_Tensor* like) {
  const size_t bytes = TF_TensorByteSize(like);
  void* const block = GlobalOutputPool().Take(bytes);
  if (block == nullptr) return nullptr;
  std::vector<int64_t> shape(TF_NumDims(like));
  for (size_t d = 0; d < shape.size(); ++d) shape[d] = TF_Dim(like, static_cast<int>(d));
  TF_Tensor* const tensor =
      TF_NewTensor(TF_TensorType(like), shape.data(), static_cast<int>(shape.size()), block, bytes,
                   &ReleaseBlock, nullptr);
  // TF_NewTensor has taken the block, and gives it back, in either case.
  return Tensor(tensor);
}

std::optional<DType> DTypeFromTensorFlow(TF_DataType dtype) {
  switch (dtype) {
    case TF_FLOAT: return DType::kFloat32;
    case TF_DOUBLE: return DType::kFloat64;
    case TF_HALF: return DType::kFloat16;
    case TF_BFLOAT16: return DType::kBFloat16;
    default: return std::nullopt;
  }
}

Status CheckLocals(const Layout& layout, const std::vector<Tensor>& locals) {
  const std::vector<Variable>& variables = layout.variables();
  if (locals.size() != variables.size()) {
    return InvalidArgumentError("the segment has " + std::to_string(variables.size()) +
                                " variables, the op got " + std::to_string(locals.size()) +
                                " [SMB-E231]");
  }
  for (size_t i = 0; i < locals.size(); ++i) {
    const auto elements = static_cast<uint64_t>(TF_TensorElementCount(locals[i].get()));
    if (elements != variables[i].num_elements) {
      return InvalidArgumentError("input " + std::to_string(i) + " has " +
                                  std::to_string(elements) + " elements, variable " +
                                  variables[i].ToString() + " has " +
                                  std::to_string(variables[i].num_elements) + " [SMB-E232]");
    }
    const std::optional<DType> dtype = DTypeFromTensorFlow(TF_TensorType(locals[i].get()));
    if (dtype != variables[i].dtype) {
      return InvalidArgumentError("input " + std::to_string(i) + " is " +
                                  (dtype.has_value() ? DTypeName(*dtype) : "of another dtype") +
                                  ", variable " + variables[i].ToString() + " is not [SMB-E233]");
    }
  }
  return Status::Ok();
}

// A scalar, as the first output.
template <typename Value>
Status SetScalar(TF_OpKernelContext* context, TF_DataType dtype, Value value, TF_Status* status) {
  const Tensor tensor(TF_AllocateOutput(context, kFirstOutput, dtype, nullptr, 0, sizeof(Value),
                                        status));
  TF_SMB_RETURN_IF_ERROR(FromTensorFlow(status));
  *static_cast<Value*>(TF_TensorData(tensor.get())) = value;
  return Status::Ok();
}

struct Inputs {
  std::shared_ptr<AttachedSegment> segment;
  uint64_t steps = 0;
  uint64_t batches = 0;
};

Result<Inputs> GetInputs(TF_OpKernelContext* context, TF_Status* status) {
  TF_SMB_ASSIGN_OR_RETURN(const int64_t handle, GetInt64(context, kHandleInput, status));
  TF_SMB_ASSIGN_OR_RETURN(const int64_t steps, GetInt64(context, kStepsInput, status));
  TF_SMB_ASSIGN_OR_RETURN(const int64_t batches, GetInt64(context, kBatchesInput, status));
  Inputs inputs{FindSegment(handle), static_cast<uint64_t>(steps),
                static_cast<uint64_t>(batches)};
  if (inputs.segment == nullptr) {
    return FailedPreconditionError("segment handle " + std::to_string(handle) +
                                   " is not attached in this process [SMB-E234]");
  }
  return inputs;
}

Status IsDue(TF_OpKernelContext* context, TF_Status* status) {
  TF_SMB_ASSIGN_OR_RETURN(const Inputs inputs, GetInputs(context, status));
  TF_SMB_ASSIGN_OR_RETURN(const bool due, inputs.segment->IsDue(inputs.steps, inputs.batches));
  return SetScalar(context, TF_BOOL, due, status);
}

Result<ExchangeOutcome> ExchangeTensors(const Inputs& inputs, const std::vector<Tensor>& locals,
                                        const std::vector<Tensor>& deltas) {
  std::vector<const void*> local_data;
  std::vector<void*> delta_data;
  for (const Tensor& local : locals) local_data.push_back(TF_TensorData(local.get()));
  for (const Tensor& delta : deltas) delta_data.push_back(TF_TensorData(delta.get()));
  InterruptWatch interrupts;
  WaitOptions options;
  options.timeout_s = inputs.segment->round_timeout_s();
  options.poll = [&interrupts] { return interrupts.Poll(); };
  options.announce = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  const Result<ExchangeOutcome> outcome = inputs.segment->ExchangeScheduled(
      WholeSpans(inputs.segment->layout(), local_data), delta_data, MoveOutput::kDelta,
      inputs.steps, inputs.batches, options);
  // See interrupt.h.
  if (!outcome.ok() && interrupts.interrupted()) return ExchangeOutcome::kSkipped;
  return outcome;
}

Status Exchange(TF_OpKernelContext* context, TF_Status* status) {
  TF_SMB_ASSIGN_OR_RETURN(const Inputs inputs, GetInputs(context, status));
  std::vector<Tensor> locals;
  for (int i = kFirstLocalInput; i < TF_NumInputs(context); ++i) {
    locals.push_back(GetInput(context, i, status));
    TF_SMB_RETURN_IF_ERROR(FromTensorFlow(status));
  }
  TF_SMB_RETURN_IF_ERROR(CheckLocals(inputs.segment->layout(), locals));
  std::vector<Tensor> deltas;
  for (const Tensor& local : locals) {
    deltas.push_back(NewPooledTensor(local.get()));
    if (deltas.back() == nullptr) {
      return ResourceExhaustedError("no memory for an exchange [SMB-E235]");
    }
  }
  TF_SMB_ASSIGN_OR_RETURN(const ExchangeOutcome outcome, ExchangeTensors(inputs, locals, deltas));
  const bool written =
      outcome == ExchangeOutcome::kMoved || outcome == ExchangeOutcome::kReplaced;
  const std::vector<Tensor>& outputs = written ? deltas : locals;
  for (size_t i = 0; i < outputs.size(); ++i) {
    TF_SetOutput(context, kFirstDeltaOutput + static_cast<int>(i), outputs[i].get(), status);
    TF_SMB_RETURN_IF_ERROR(FromTensorFlow(status));
  }
  return SetScalar(context, TF_INT32, static_cast<int32_t>(outcome), status);
}

template <Status (*kCompute)(TF_OpKernelContext*, TF_Status*)>
void Compute(void*, TF_OpKernelContext* context) {
  TF_Status* const status = TF_NewStatus();
  const Status result = kCompute(context, status);
  if (!result.ok()) {
    ToTensorFlow(result, status);
    TF_OpKernelContext_Failure(context, status);
  }
  TF_DeleteStatus(status);
}

void Register(const char* op_name, void (*compute)(void*, TF_OpKernelContext*)) {
  TF_KernelBuilder* const builder =
      TF_NewKernelBuilder(op_name, "CPU", nullptr, compute, nullptr);
  TF_Status* const status = TF_NewStatus();
  TF_RegisterKernelBuilder(op_name, builder, status);
  if (TF_GetCode(status) != TF_OK) {
    std::fprintf(stderr, "tf_smb: cannot register the kernel of %s: %s\n", op_name,
                 TF_Message(status));
  }
  TF_DeleteStatus(status);
}

}  // namespace

void RegisterExchangeKernels() {
  Register(kExchangeOpName, &Compute<&Exchange>);
  Register(kIsDueOpName, &Compute<&IsDue>);
}

}  // namespace tf_smb
