#include "cc/common/status.h"

#include <cerrno>
#include <cstring>

namespace tf_smb {

const char* StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "OK";
    case StatusCode::kInvalidArgument: return "INVALID_ARGUMENT";
    case StatusCode::kNotFound: return "NOT_FOUND";
    case StatusCode::kAlreadyExists: return "ALREADY_EXISTS";
    case StatusCode::kFailedPrecondition: return "FAILED_PRECONDITION";
    case StatusCode::kPermissionDenied: return "PERMISSION_DENIED";
    case StatusCode::kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case StatusCode::kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case StatusCode::kUnavailable: return "UNAVAILABLE";
    case StatusCode::kDataLoss: return "DATA_LOSS";
    case StatusCode::kAborted: return "ABORTED";
    case StatusCode::kInternal: return "INTERNAL";
  }
  return "UNKNOWN";
}

const char* FailureScopeName(FailureScope scope) {
  switch (scope) {
    case FailureScope::kCall: return "call";
    case FailureScope::kConnection: return "connection";
    case FailureScope::kLease: return "lease";
    case FailureScope::kServer: return "server";
  }
  return "unknown";
}

Status::Status(StatusCode code, std::string message, FailureScope scope) {
  if (code == StatusCode::kOk) return;
  state_ = std::make_shared<const State>(State{code, std::move(message), scope});
}

const std::string& Status::message() const {
  static const std::string* const kEmpty = new std::string();
  return ok() ? *kEmpty : state_->message;
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  return std::string(StatusCodeName(code())) + ": " + message();
}

Status InvalidArgumentError(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}
Status NotFoundError(std::string message) {
  return Status(StatusCode::kNotFound, std::move(message));
}
Status AlreadyExistsError(std::string message) {
  return Status(StatusCode::kAlreadyExists, std::move(message));
}
Status FailedPreconditionError(std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message));
}
Status PermissionDeniedError(std::string message) {
  return Status(StatusCode::kPermissionDenied, std::move(message));
}
Status ResourceExhaustedError(std::string message) {
  return Status(StatusCode::kResourceExhausted, std::move(message));
}
Status DeadlineExceededError(std::string message) {
  return Status(StatusCode::kDeadlineExceeded, std::move(message));
}
Status UnavailableError(std::string message) {
  return Status(StatusCode::kUnavailable, std::move(message), FailureScope::kConnection);
}
Status DataLossError(std::string message) {
  return Status(StatusCode::kDataLoss, std::move(message));
}
Status AbortedError(std::string message) {
  return Status(StatusCode::kAborted, std::move(message), FailureScope::kLease);
}
Status InternalError(std::string message) {
  return Status(StatusCode::kInternal, std::move(message));
}

Status ErrnoError(int error_number, const std::string& what, const char* anchor) {
  const std::string message = what + ": " + std::strerror(error_number) + " " + anchor;
  switch (error_number) {
    case ENOENT:
      return NotFoundError(message);
    case EEXIST:
    case EADDRINUSE:
      return AlreadyExistsError(message);
    case EACCES:
    case EPERM:
      return PermissionDeniedError(message);
    case ENOMEM:
    case ENOSPC:
    case EFBIG:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return ResourceExhaustedError(message);
    case ETIMEDOUT:
      return DeadlineExceededError(message);
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN:
      return UnavailableError(message);
    case EINVAL:
      return InvalidArgumentError(message);
    default:
      return InternalError(message);
  }
}

}  // namespace tf_smb
