#include "cc/kernels/tf_status.h"

namespace tf_smb {
namespace {

TF_Code ToTensorFlowCode(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return TF_OK;
    case StatusCode::kInvalidArgument: return TF_INVALID_ARGUMENT;
    case StatusCode::kNotFound: return TF_NOT_FOUND;
    case StatusCode::kAlreadyExists: return TF_ALREADY_EXISTS;
    case StatusCode::kFailedPrecondition: return TF_FAILED_PRECONDITION;
    case StatusCode::kPermissionDenied: return TF_PERMISSION_DENIED;
    case StatusCode::kResourceExhausted: return TF_RESOURCE_EXHAUSTED;
    case StatusCode::kDeadlineExceeded: return TF_DEADLINE_EXCEEDED;
    case StatusCode::kUnavailable: return TF_FAILED_PRECONDITION;
    case StatusCode::kDataLoss: return TF_DATA_LOSS;
    case StatusCode::kAborted: return TF_ABORTED;
    case StatusCode::kInternal: return TF_INTERNAL;
  }
  return TF_UNKNOWN;
}

}  // namespace

Status FromTensorFlow(const TF_Status* status) {
  if (TF_GetCode(status) == TF_OK) return Status::Ok();
  return InternalError(std::string("TensorFlow: ") + TF_Message(status) + " [SMB-E236]");
}

void ToTensorFlow(const Status& from, TF_Status* to) {
  TF_SetStatus(to, ToTensorFlowCode(from.code()), from.message().c_str());
}

}  // namespace tf_smb

int tf_smb_tensorflow_code(int status_code) {
  const std::string message;  // only the code is asked for
  TF_Status* const status = TF_NewStatus();
  tf_smb::ToTensorFlow(tf_smb::Status(static_cast<tf_smb::StatusCode>(status_code), message),
                       status);
  const int code = TF_GetCode(status);
  TF_DeleteStatus(status);
  return code;
}
