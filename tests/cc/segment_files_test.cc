// Segments as files in a folder, alone and of a server.
#include "cc/server/segment_files.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "cc/server/server.h"
#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

class SegmentFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/segment_files_test-XXXXXX";
    ASSERT_NE(mkdtemp(pattern), nullptr);
    directory_ = pattern;
    address_ = "shm://segment_files_test-" + std::to_string(getpid());
    server_name_ = address_.substr(6);
  }
  void TearDown() override {
    EXPECT_EQ(std::system(("rm -rf " + directory_).c_str()), 0);
  }

  SegmentOptions Options(const std::string& name = "run/0") const {
    SegmentOptions options = OptionsOf(LayoutOf({{1000}}));
    options.name = name;
    options.directory = directory_;
    options.file_name = SegmentFileName(server_name_, name);
    return options;
  }
  std::string Path(const std::string& name = "run/0") const {
    return directory_ + "/" + SegmentFileName(server_name_, name);
  }
  bool Exists(const std::string& path) const { return access(path.c_str(), F_OK) == 0; }
  Result<std::unique_ptr<Segment>> MapFile(const std::string& path) const {
    return Segment::Map(UniqueFd(open(path.c_str(), O_RDWR | O_CLOEXEC)));
  }
  std::unique_ptr<Server> StartServer() const {
    Result<std::unique_ptr<Server>> server = Server::Start({address_, 10.0, directory_});
    EXPECT_TRUE(server.ok()) << server.status().message();
    return std::move(server).value();
  }
  Request OpenOf(const std::string& name = "run/0", const std::string& job = "job",
                 OnExisting on_existing = OnExisting::kFail) const {
    Request request;
    request.type = MessageType::kOpen;
    request.open.segment_name = name;
    request.open.job_id = job;
    request.open.on_existing = on_existing;
    request.open.layout = LayoutOf({{1000}});
    return request;
  }
  Request Of(MessageType type, const std::string& name) const {
    Request request;
    request.type = type;
    request.segment_name = name;
    return request;
  }
  // The only file that is refused, with its reason.
  std::string Refused() const {
    const FoundSegments found = FindSegmentFiles(directory_, server_name_);
    EXPECT_TRUE(found.segments.empty());
    EXPECT_EQ(found.refused.size(), 1u);
    if (found.refused.size() != 1) return "";
    const std::string prefix = Path() + ": ";
    EXPECT_EQ(found.refused[0].substr(0, prefix.size()), prefix);
    return found.refused[0].substr(prefix.size());
  }

  std::string directory_, address_, server_name_;
};

TEST_F(SegmentFilesTest, NamesAreInjectiveAndPlain) {
  const std::string user = std::to_string(geteuid());
  EXPECT_EQ(SegmentFileName("srv", "run-1_a"), "tf_smb." + user + ".srv.run-1_a");
  EXPECT_EQ(SegmentFileName("a.b", "run/0"), "tf_smb." + user + ".a%2Eb.run%2F0");
  std::set<std::string> names;
  const std::string parts[] = {"a",   "a.b", "a%2Eb", "a/b", "..", ".", "/", "\xff", "\x01",
                               "A",   std::string(100, 'x'), std::string(101, 'x'),
                               std::string(200, 'x'), std::string(199, 'x') + "y",
                               std::string(199, '/') + "y", std::string(200, '/')};
  for (const std::string& server : parts) {
    for (const std::string& segment : parts) {
      const std::string name = SegmentFileName(server, segment);
      EXPECT_TRUE(names.insert(name).second) << name;
      EXPECT_LE(name.size(), 255u);
      EXPECT_EQ(name.find('/'), std::string::npos);
    }
  }
}

TEST_F(SegmentFilesTest, FileIsItsOwnersAloneAndWhole) {
  const mode_t old_mask = umask(0);
  const Result<std::unique_ptr<Segment>> segment = Segment::Create(Options());
  umask(old_mask);
  ASSERT_TRUE(segment.ok()) << segment.status().message();
  struct stat info;
  ASSERT_EQ(stat(Path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode, static_cast<mode_t>(S_IFREG | 0600));
  EXPECT_GE(info.st_blocks * 512, info.st_size);  // the memory is there
  (*segment)->center()[3] = 'x';
  const Result<std::unique_ptr<Segment>> mapped = MapFile(Path());
  ASSERT_TRUE(mapped.ok()) << mapped.status().message();
  EXPECT_EQ((*mapped)->center()[3], 'x');
  EXPECT_EQ((*mapped)->name(), "run/0");
}

TEST_F(SegmentFilesTest, ExistingFileIsNotTouched) {
  ASSERT_TRUE(Segment::Create(Options()).ok());
  std::ofstream(directory_ + "/other") << "x";
  const Status status = Segment::Create(Options()).status();
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(status.message().find(Path()), std::string::npos);
  EXPECT_TRUE(MapFile(Path()).ok());
  SegmentOptions nowhere = Options();
  nowhere.directory = directory_ + "/none";
  EXPECT_EQ(Segment::Create(nowhere).status().code(), StatusCode::kNotFound);
}

TEST_F(SegmentFilesTest, MoreThanTheFolderHoldsLeavesNothing) {
  SegmentOptions options = Options();
  options.layout = LayoutOf({{1LL << 44}});
  EXPECT_EQ(Segment::Create(options).status().code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(Exists(Path()));
}

// Killed while it makes one: an unfinished file has no name.
TEST_F(SegmentFilesTest, KilledCreatorLeavesWholeFilesOnly) {
  for (int round = 0; round < 10; ++round) {
    const pid_t child = Spawn([this] {
      for (int i = 0;; ++i) {
        static_cast<void>(Segment::Create(Options("run/" + std::to_string(i % 50))));
        unlink(Path("run/" + std::to_string((i + 25) % 50)).c_str());
      }
      return 0;
    });
    usleep(static_cast<useconds_t>(3000 + 2500 * round));
    Kill(child);
    EXPECT_TRUE(FindSegmentFiles(directory_, server_name_).refused.empty());
  }
}

TEST_F(SegmentFilesTest, OnlyThisServersAreFound) {
  SegmentOptions others = Options();
  others.file_name = SegmentFileName(server_name_ + "x", "run/0");
  ASSERT_TRUE(Segment::Create(others).ok());
  ASSERT_TRUE(Segment::Create(Options("run/0")).ok());
  ASSERT_TRUE(Segment::Create(Options("run/1")).ok());
  const FoundSegments found = FindSegmentFiles(directory_, server_name_);
  ASSERT_EQ(found.segments.size(), 2u);
  EXPECT_EQ(found.segments[0]->name(), "run/0");
  EXPECT_EQ(found.segments[1]->name(), "run/1");
  EXPECT_TRUE(found.refused.empty());
  EXPECT_TRUE(FindSegmentFiles(directory_ + "/none", server_name_).segments.empty());
}

TEST_F(SegmentFilesTest, OpenToOthersIsRefused) {
  ASSERT_TRUE(Segment::Create(Options()).ok());
  for (const mode_t mode : {0640, 0604, 0620, 0660, 0666, 0601}) {
    ASSERT_EQ(chmod(Path().c_str(), mode), 0);
    EXPECT_EQ(MapFile(Path()).status().code(), StatusCode::kPermissionDenied);
    char text[8];
    std::snprintf(text, sizeof(text), "%04o", mode);
    EXPECT_NE(Refused().find(std::string("has mode ") + text + ": others may open it"),
              std::string::npos)
        << Refused();
  }
  ASSERT_EQ(chmod(Path().c_str(), 0600), 0);
  EXPECT_TRUE(MapFile(Path()).ok());
}

TEST_F(SegmentFilesTest, AnotherUsersIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "to give a file away, it takes root";
  ASSERT_TRUE(Segment::Create(Options()).ok());
  if (chown(Path().c_str(), 65534, 65534) != 0) GTEST_SKIP() << "there is no other user here";
  EXPECT_EQ(MapFile(Path()).status().code(), StatusCode::kPermissionDenied);
  EXPECT_NE(Refused().find("belongs to user 65534, this process runs as user 0"),
            std::string::npos);
}

TEST_F(SegmentFilesTest, DamagedOnesSayWhy) {
  ASSERT_TRUE(Segment::Create(Options()).ok());
  struct stat info;
  ASSERT_EQ(stat(Path().c_str(), &info), 0);
  ASSERT_EQ(truncate(Path().c_str(), info.st_size - 1), 0);
  EXPECT_NE(Refused().find("the segment was cut"), std::string::npos) << Refused();
  ASSERT_EQ(truncate(Path().c_str(), 100), 0);
  EXPECT_NE(Refused().find("it is cut short"), std::string::npos) << Refused();
  ASSERT_EQ(truncate(Path().c_str(), 0), 0);
  ASSERT_EQ(truncate(Path().c_str(), info.st_size), 0);  // zeros
  EXPECT_NE(Refused().find("magic number"), std::string::npos) << Refused();
  ASSERT_EQ(unlink(Path().c_str()), 0);
  ASSERT_EQ(symlink("/dev/zero", Path().c_str()), 0);
  EXPECT_NE(Refused().find("cannot open it"), std::string::npos) << Refused();
  ASSERT_EQ(unlink(Path().c_str()), 0);
  ASSERT_EQ(mkfifo(Path().c_str(), 0600), 0);
  EXPECT_FALSE(Refused().empty());
  ASSERT_EQ(unlink(Path().c_str()), 0);
  ASSERT_EQ(mkdir(Path().c_str(), 0700), 0);
  EXPECT_NE(Refused().find("Is a directory"), std::string::npos) << Refused();
}

// A copy under another name would be two segments of one name.
TEST_F(SegmentFilesTest, CopyUnderAnotherNameIsRefused) {
  SegmentOptions options = Options("run/1");
  options.file_name = SegmentFileName(server_name_, "run/0");
  ASSERT_TRUE(Segment::Create(options).ok());
  EXPECT_NE(Refused().find("it holds segment 'run/1', whose file has another name"),
            std::string::npos)
      << Refused();
}

// --- With a server -------------------------------------------------------------------

TEST_F(SegmentFilesTest, ServerMakesAndRemovesThem) {
  std::unique_ptr<Server> server = StartServer();
  ASSERT_TRUE(server->Handle(OpenOf("run/0")).reply.status.ok());
  ASSERT_TRUE(server->Handle(OpenOf("run/1")).reply.status.ok());
  EXPECT_TRUE(Exists(Path("run/0")));
  EXPECT_TRUE(Exists(Path("run/1")));
  ASSERT_TRUE(server->Handle(Of(MessageType::kFree, "run/0")).reply.status.ok());
  EXPECT_FALSE(Exists(Path("run/0")));
  ASSERT_TRUE(server->Handle(OpenOf("run/0")).reply.status.ok());
  EXPECT_TRUE(server->Handle(OpenOf("run/1", "job-2", OnExisting::kResume)).reply.status.ok());
  EXPECT_TRUE(server->Handle(OpenOf("run/1", "job-2", OnExisting::kReplace)).reply.created);
  EXPECT_TRUE(Exists(Path("run/1")));
  server.reset();
  EXPECT_FALSE(Exists(Path("run/0")));
  EXPECT_FALSE(Exists(Path("run/1")));
}

// A real server process is killed; the next one has its segments, and who is attached
// goes on.
TEST_F(SegmentFilesTest, NextServerTakesOverWhatAKilledOneLeft) {
  const pid_t child = Spawn([this] {
    const std::unique_ptr<Server> server = StartServer();
    const HandledRequest handled = server->Handle(OpenOf());
    if (!handled.reply.status.ok()) return 1;
    handled.segment->center()[5] = 'x';
    handled.segment->AdvanceVersion();
    if (!handled.segment->Join(0).ok()) return 2;
    raise(SIGSTOP);
    return 3;
  });
  WaitStopped(child);
  Segment* const attached = Keep(MapFile(Path()));
  const MemberId member = *attached->Join(1);
  Kill(child);
  EXPECT_TRUE(Exists(Path()));
  std::ofstream(Path("bad")) << "nonsense";
  ASSERT_EQ(chmod(Path("bad").c_str(), 0600), 0);
  std::unique_ptr<Server> server = StartServer();
  ASSERT_EQ(server->refused_files().size(), 1u);
  EXPECT_NE(server->refused_files()[0].find(Path("bad") + ": the segment's header is damaged"),
            std::string::npos);
  const std::vector<SegmentSummary> list = server->List();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].name, "run/0");
  EXPECT_EQ(list[0].live_members, 1u);  // the killed one is dead
  const HandledRequest handled = server->Handle(Of(MessageType::kAttach, "run/0"));
  ASSERT_TRUE(handled.reply.status.ok());
  EXPECT_EQ(handled.segment->center()[5], 'x');
  EXPECT_EQ(handled.segment->version(), 1u);
  EXPECT_TRUE(attached->CheckMember(member).ok());
  attached->Leave(member);
  // What stands in the way is not touched, and said.
  const Status in_the_way = server->Handle(OpenOf("bad")).reply.status;
  EXPECT_EQ(in_the_way.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(in_the_way.message().find(Path("bad")), std::string::npos);
  server.reset();
  EXPECT_FALSE(Exists(Path()));
  EXPECT_TRUE(Exists(Path("bad")));
}

// One that could not start takes nothing away from the one that runs.
TEST_F(SegmentFilesTest, SecondServerLeavesTheFirstOnesFiles) {
  const std::unique_ptr<Server> server = StartServer();
  ASSERT_TRUE(server->Handle(OpenOf()).reply.status.ok());
  EXPECT_EQ(Server::Start({address_, 10.0, directory_}).status().code(),
            StatusCode::kAlreadyExists);
  EXPECT_TRUE(Exists(Path()));
}

}  // namespace
}  // namespace tf_smb
