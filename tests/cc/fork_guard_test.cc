#include "cc/common/fork_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

namespace tf_smb {
namespace {

int InChild(int (*body)(const ForkGuard&), const ForkGuard& guard) {
  const pid_t child = fork();
  if (child == 0) _exit(body(guard));
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(ForkGuardTest, ChildIsToldAboutForkAndSpawn) {
  const ForkGuard guard;
  EXPECT_TRUE(guard.Check().ok());
  EXPECT_EQ(InChild(
                [](const ForkGuard& g) {
                  const Status status = g.Check();
                  const bool named = status.message().find("fork()") != std::string::npos &&
                                     status.message().find("'spawn'") != std::string::npos;
                  return g.InForkedChild() && named &&
                                 status.code() == StatusCode::kFailedPrecondition
                             ? 0
                             : 1;
                },
                guard),
            0);
  EXPECT_TRUE(guard.Check().ok());  // the parent is none
}

TEST(ForkGuardTest, WhatTheChildMakesIsItsOwn) {
  const ForkGuard guard;
  EXPECT_EQ(InChild(
                [](const ForkGuard& parents) {
                  const ForkGuard own;
                  return own.Check().ok() && !parents.Check().ok() ? 0 : 1;
                },
                guard),
            0);
}

}  // namespace
}  // namespace tf_smb
