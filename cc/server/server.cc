#include "cc/server/server.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "cc/server/segment_files.h"
#include "cc/transport/registry.h"

namespace tf_smb {
namespace {

HandledRequest Refuse(Status status) {
  HandledRequest handled;
  handled.reply.status = std::move(status);
  return handled;
}

HandledRequest Grant(std::shared_ptr<Segment> segment, bool created) {
  HandledRequest handled;
  handled.reply.created = created;
  handled.segment = std::move(segment);
  return handled;
}

// All who came have left, and nobody is still expected.
bool IsFinished(const std::vector<MemberInfo>& members, uint32_t num_workers) {
  bool any_left = false;
  for (const MemberInfo& member : members) {
    if (member.state == MemberState::kLive) return false;
    any_left = any_left || member.state == MemberState::kLeft;
  }
  return any_left || members.size() >= num_workers;
}

// Why `request` may not silently join `segment`; OK if it may.
Status CheckSameLivingJob(Segment* segment, const OpenRequest& request) {
  const std::vector<MemberInfo> members = segment->Members();
  const bool other_job = segment->job_id() != request.job_id;
  const bool finished = IsFinished(members, segment->num_workers());
  if (!other_job && !finished) return Status::Ok();
  return FailedPreconditionError(
      "segment '" + request.segment_name + "' exists already, from " +
      (other_job ? "another job ('" + segment->job_id() + "')" : "an earlier run of this job") +
      (finished ? " that is finished" : " that is still running") +
      ": choose another run_name, or say on_existing='resume' to go on from its weights or "
      "'replace' to start anew [SMB-E150]");
}

}  // namespace

Result<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  TF_SMB_ASSIGN_OR_RETURN(const Address address, Address::Parse(options.address));
  TF_SMB_ASSIGN_OR_RETURN(Transport* const transport, FindTransport(address));
  std::unique_ptr<Server> server(new Server(options, address.target));
  // Under the lock: a first request may come before all is set.
  MutexLock lock(&server->mutex_);
  TF_SMB_ASSIGN_OR_RETURN(server->listener_, transport->Listen(address, server.get()));
  // Nobody else listens there now, so nobody else's files have this name.
  if (!options.directory.empty()) server->TakeOverFilesLocked();
  return server;
}

void Server::TakeOverFilesLocked() {
  FoundSegments found = FindSegmentFiles(options_.directory, name_);
  for (std::unique_ptr<Segment>& segment : found.segments) {
    const std::string segment_name = segment->name();
    segments_[segment_name] = std::move(segment);
  }
  refused_files_ = std::move(found.refused);
}

void Server::RemoveFile(const std::string& segment_name) const {
  if (options_.directory.empty()) return;
  unlink((options_.directory + "/" + SegmentFileName(name_, segment_name)).c_str());
}

Server::~Server() {
  // Its threads are the parent's: a forked child can only forget them.
  if (fork_guard_.InForkedChild()) {
    static_cast<void>(listener_.release());
    return;
  }
  listener_.reset();
  MutexLock lock(&mutex_);
  for (const auto& [name, segment] : segments_) RemoveFile(name);
}

std::vector<SegmentSummary> Server::List() {
  MutexLock lock(&mutex_);
  return ListLocked();
}

void Server::MarkWorkerAbsent(uint32_t worker_index) {
  MutexLock lock(&mutex_);
  absent_workers_.insert(worker_index);
  for (const auto& [name, segment] : segments_) segment->MarkAbsent(worker_index);
}

HandledRequest Server::Handle(const Request& request) {
  MutexLock lock(&mutex_);
  switch (request.type) {
    case MessageType::kOpen:
      return OpenLocked(request.open);
    case MessageType::kAttach:
      return AttachLocked(request.segment_name);
    case MessageType::kFree:
      return FreeLocked(request.segment_name);
    case MessageType::kList: {
      HandledRequest handled;
      handled.reply.segments = ListLocked();
      return handled;
    }
    case MessageType::kReply:
      break;
  }
  return Refuse(InvalidArgumentError("a server takes requests, not replies [SMB-E153]"));
}

HandledRequest Server::OpenLocked(const OpenRequest& request) {
  const auto found = segments_.find(request.segment_name);
  if (found == segments_.end()) return CreateLocked(request);
  const std::shared_ptr<Segment> segment = found->second;
  const Status same = CheckSameLivingJob(segment.get(), request);
  if (!same.ok() && request.on_existing == OnExisting::kFail) return Refuse(same);
  if (!same.ok() && request.on_existing == OnExisting::kReplace) {
    if (segment->CountLive() > 0) {
      return Refuse(FailedPreconditionError(
          "segment '" + request.segment_name + "' cannot be replaced: job '" + segment->job_id() +
          "' has " + std::to_string(segment->CountLive()) + " live workers on it [SMB-E151]"));
    }
    segments_.erase(found);
    RemoveFile(request.segment_name);
    return CreateLocked(request);
  }
  Status same_layout =
      request.layout.CheckSame(segment->layout(), "segment '" + request.segment_name + "'");
  if (!same_layout.ok()) return Refuse(std::move(same_layout));
  return Grant(segment, /*created=*/false);
}

HandledRequest Server::CreateLocked(const OpenRequest& request) {
  SegmentOptions options;
  options.name = request.segment_name;
  options.job_id = request.job_id;
  options.num_workers = request.num_workers;
  options.lease_s = options_.lease_s;
  options.layout = request.layout;
  options.sparse = request.sparse;
  options.directory = options_.directory;
  if (!options.directory.empty()) {
    options.file_name = SegmentFileName(name_, request.segment_name);
  }
  Result<std::unique_ptr<Segment>> created = Segment::Create(options);
  if (!created.ok()) return Refuse(created.status());
  const std::shared_ptr<Segment> segment = std::move(created).value();
  for (const uint32_t worker_index : absent_workers_) segment->MarkAbsent(worker_index);
  segments_[request.segment_name] = segment;
  return Grant(segment, /*created=*/true);
}

HandledRequest Server::AttachLocked(const std::string& name) {
  const auto found = segments_.find(name);
  if (found == segments_.end()) return Refuse(NoSuchSegmentLocked(name));
  return Grant(found->second, /*created=*/false);
}

HandledRequest Server::FreeLocked(const std::string& name) {
  const auto found = segments_.find(name);
  if (found == segments_.end()) return Refuse(NoSuchSegmentLocked(name));
  segments_.erase(found);
  RemoveFile(name);
  return HandledRequest();
}

Status Server::NoSuchSegmentLocked(const std::string& name) const {
  constexpr size_t kMaxNamed = 20;
  std::string names;
  size_t named = 0;
  for (const auto& [existing, segment] : segments_) {
    if (named == kMaxNamed) {
      names += " and " + std::to_string(segments_.size() - named) + " more";
      break;
    }
    names += (names.empty() ? "" : ", ") + ("'" + existing + "'");
    ++named;
  }
  return NotFoundError("there is no segment '" + name + "' at " + listener_->address() +
                       "; it has " + (names.empty() ? "none" : names) + " [SMB-E152]");
}

std::vector<SegmentSummary> Server::ListLocked() {
  std::vector<SegmentSummary> summaries;
  for (const auto& [name, segment] : segments_) {
    segment->Reap();
    summaries.push_back({name, segment->job_id(),
                         segment->layout().size_bytes(), segment->CountLive()});
  }
  return summaries;
}

}  // namespace tf_smb
