// Status: what failed, said once, where the cause is decided. Result<T>: a value
// or the Status that stands in its place.
#ifndef TF_SMB_CC_COMMON_STATUS_H_
#define TF_SMB_CC_COMMON_STATUS_H_

#include <cassert>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace tf_smb {

// Never renumber: the values travel in replies and in the Python module.
enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,     // the caller's value is wrong, whatever the state
  kNotFound = 2,            // no such segment, member or address
  kAlreadyExists = 3,       // the name or worker index is taken
  kFailedPrecondition = 4,  // right request, wrong state (layout, job, phase)
  kPermissionDenied = 5,    // another user's
  kResourceExhausted = 6,   // memory, slots, descriptors
  kDeadlineExceeded = 7,    // the wait ended first; names whom it waited for
  kUnavailable = 8,         // the server cannot be reached
  kDataLoss = 9,            // bytes that cannot be what was written
  kAborted = 10,            // fenced: the lease lapsed, join again
  kInternal = 11,           // a defect of this library, or of the kernel
};

// The stable name of a code, for example "NOT_FOUND".
const char* StatusCodeName(StatusCode code);

// What has to be made anew before another try can go better. Never renumber.
enum class FailureScope : int {
  kCall = 0,        // nothing: the same call with other values, or later
  kConnection = 1,  // the connection: connect again
  kLease = 2,       // the membership: join again
  kServer = 3,      // the server, or its segment, is lost: start it, seed again
};

// "call", "connection", "lease" or "server".
const char* FailureScopeName(FailureScope scope);

// An OK status is one null pointer: free to make, copy and test.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, FailureScope scope = FailureScope::kCall);

  static Status Ok() { return Status(); }

  bool ok() const { return state_ == nullptr; }
  StatusCode code() const { return ok() ? StatusCode::kOk : state_->code; }
  // kCall when OK.
  FailureScope scope() const { return ok() ? FailureScope::kCall : state_->scope; }
  // The same with another scope; OK stays OK.
  Status WithScope(FailureScope scope) const {
    return ok() ? Status() : Status(state_->code, state_->message, scope);
  }
  // One sentence for people; empty when OK. Programs look at code() only.
  const std::string& message() const;
  // "NOT_FOUND: message", or "OK".
  std::string ToString() const;

 private:
  struct State {
    StatusCode code;
    std::string message;
    FailureScope scope;
  };
  std::shared_ptr<const State> state_;
};

// Every message ends with its anchor in docs/errors.md, " [SMB-Exxx]".
// Scope kCall, except UnavailableError (kConnection) and AbortedError (kLease).
Status InvalidArgumentError(std::string message);
Status NotFoundError(std::string message);
Status AlreadyExistsError(std::string message);
Status FailedPreconditionError(std::string message);
Status PermissionDeniedError(std::string message);
Status ResourceExhaustedError(std::string message);
Status DeadlineExceededError(std::string message);
Status UnavailableError(std::string message);
Status DataLossError(std::string message);
Status AbortedError(std::string message);
Status InternalError(std::string message);

// "what: strerror(error_number) anchor" under the code that fits the errno.
Status ErrnoError(int error_number, const std::string& what, const char* anchor);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}               // NOLINT(runtime/explicit)
  Result(Status status) : status_(std::move(status)) {        // NOLINT(runtime/explicit)
    assert(!status_.ok());
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace tf_smb

#define TF_SMB_CONCAT_INNER(a, b) a##b
#define TF_SMB_CONCAT(a, b) TF_SMB_CONCAT_INNER(a, b)

// Returns from the calling function if `expr` is not OK.
#define TF_SMB_RETURN_IF_ERROR(expr)               \
  do {                                             \
    ::tf_smb::Status tf_smb_status = (expr);       \
    if (!tf_smb_status.ok()) return tf_smb_status; \
  } while (false)

// TF_SMB_ASSIGN_OR_RETURN(auto value, Function());
#define TF_SMB_ASSIGN_OR_RETURN(lhs, expr) \
  TF_SMB_ASSIGN_OR_RETURN_IMPL(TF_SMB_CONCAT(tf_smb_result_, __LINE__), lhs, expr)
#define TF_SMB_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                 \
  if (!result.ok()) return result.status();             \
  lhs = std::move(result).value()

#endif  // TF_SMB_CC_COMMON_STATUS_H_
