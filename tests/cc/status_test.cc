#include "cc/common/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <string>
#include <utility>

namespace tf_smb {
namespace {

constexpr int kLastCode = static_cast<int>(StatusCode::kInternal);

TEST(StatusTest, OkIsFreeAndEmpty) {
  const Status ok;
  EXPECT_TRUE(ok.ok());
  EXPECT_EQ(ok.code(), StatusCode::kOk);
  EXPECT_EQ(ok.message(), "");
  EXPECT_EQ(ok.ToString(), "OK");
  EXPECT_EQ(sizeof(Status), sizeof(std::shared_ptr<int>));
  EXPECT_TRUE(Status(StatusCode::kOk, "dropped").ok());
}

TEST(StatusTest, EveryConstructorHasItsCode) {
  const std::pair<Status, StatusCode> all[] = {
      {InvalidArgumentError("m"), StatusCode::kInvalidArgument},
      {NotFoundError("m"), StatusCode::kNotFound},
      {AlreadyExistsError("m"), StatusCode::kAlreadyExists},
      {FailedPreconditionError("m"), StatusCode::kFailedPrecondition},
      {PermissionDeniedError("m"), StatusCode::kPermissionDenied},
      {ResourceExhaustedError("m"), StatusCode::kResourceExhausted},
      {DeadlineExceededError("m"), StatusCode::kDeadlineExceeded},
      {UnavailableError("m"), StatusCode::kUnavailable},
      {DataLossError("m"), StatusCode::kDataLoss},
      {AbortedError("m"), StatusCode::kAborted},
      {InternalError("m"), StatusCode::kInternal},
  };
  std::set<StatusCode> codes;
  for (const auto& [status, code] : all) {
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.code(), code);
    EXPECT_EQ(status.message(), "m");
    EXPECT_EQ(status.ToString(), std::string(StatusCodeName(code)) + ": m");
    codes.insert(code);
  }
  EXPECT_EQ(codes.size(), static_cast<size_t>(kLastCode));
}

// They travel in replies: frozen.
TEST(StatusTest, CodesAndNamesAreFrozen) {
  const char* const names[] = {"OK",
                               "INVALID_ARGUMENT",
                               "NOT_FOUND",
                               "ALREADY_EXISTS",
                               "FAILED_PRECONDITION",
                               "PERMISSION_DENIED",
                               "RESOURCE_EXHAUSTED",
                               "DEADLINE_EXCEEDED",
                               "UNAVAILABLE",
                               "DATA_LOSS",
                               "ABORTED",
                               "INTERNAL"};
  for (int code = 0; code <= kLastCode; ++code) {
    EXPECT_STREQ(StatusCodeName(static_cast<StatusCode>(code)), names[code]);
  }
  EXPECT_STREQ(StatusCodeName(static_cast<StatusCode>(kLastCode + 1)), "UNKNOWN");
}

TEST(StatusTest, ErrnoKeepsItsText) {
  EXPECT_EQ(ErrnoError(ENOSPC, "x", "[SMB-E999]").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoError(EACCES, "x", "[SMB-E999]").code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrnoError(EPIPE, "x", "[SMB-E999]").code(), StatusCode::kUnavailable);
  EXPECT_EQ(ErrnoError(EADDRINUSE, "x", "[SMB-E999]").code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(ErrnoError(ENOTTY, "x", "[SMB-E999]").code(), StatusCode::kInternal);
  EXPECT_EQ(ErrnoError(ENOENT, "cannot open", "[SMB-E999]").message(),
            "cannot open: No such file or directory [SMB-E999]");
}

// They travel in replies: frozen.
TEST(StatusTest, ScopesAndNamesAreFrozen) {
  const char* const names[] = {"call", "connection", "lease", "server"};
  for (int scope = 0; scope < 4; ++scope) {
    EXPECT_STREQ(FailureScopeName(static_cast<FailureScope>(scope)), names[scope]);
  }
  EXPECT_STREQ(FailureScopeName(static_cast<FailureScope>(4)), "unknown");
}

TEST(StatusTest, ScopeIsWhatTheCodeUsuallyMeans) {
  EXPECT_EQ(Status().scope(), FailureScope::kCall);
  EXPECT_EQ(UnavailableError("m").scope(), FailureScope::kConnection);
  EXPECT_EQ(AbortedError("m").scope(), FailureScope::kLease);
  for (const Status& status : {InvalidArgumentError("m"), NotFoundError("m"), DataLossError("m"),
                               DeadlineExceededError("m"), InternalError("m")}) {
    EXPECT_EQ(status.scope(), FailureScope::kCall);
  }
  EXPECT_EQ(ErrnoError(ECONNREFUSED, "x", "[SMB-E999]").scope(), FailureScope::kConnection);
}

TEST(StatusTest, WithScopeKeepsTheRest) {
  const Status lost = DataLossError("m").WithScope(FailureScope::kServer);
  EXPECT_EQ(lost.scope(), FailureScope::kServer);
  EXPECT_EQ(lost.code(), StatusCode::kDataLoss);
  EXPECT_EQ(lost.message(), "m");
  EXPECT_TRUE(Status().WithScope(FailureScope::kServer).ok());
  EXPECT_EQ(Status().WithScope(FailureScope::kServer).scope(), FailureScope::kCall);
}

Result<std::string> Twice(Result<std::string> text) {
  TF_SMB_ASSIGN_OR_RETURN(const std::string value, std::move(text));
  return value + value;
}

TEST(ResultTest, ValueOrStatus) {
  EXPECT_EQ(*Twice(std::string("ab")), "abab");
  EXPECT_TRUE(Twice(std::string("ab")).status().ok());
  const Result<std::string> failed = Twice(NotFoundError("gone"));
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(failed.status().ToString(), "NOT_FOUND: gone");
}

}  // namespace
}  // namespace tf_smb
