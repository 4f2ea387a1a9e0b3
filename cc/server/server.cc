#include "cc/server/server.h"

#include <algorithm>
#include <utility>

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
      "'replace' to start anew");
}

}  // namespace

Result<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  TF_SMB_ASSIGN_OR_RETURN(const Address address, Address::Parse(options.address));
  TF_SMB_ASSIGN_OR_RETURN(Transport* const transport, FindTransport(address));
  std::unique_ptr<Server> server(new Server(options.lease_s));
  // Under the lock: a first request may come before `listener_` is set.
  MutexLock lock(&server->mutex_);
  TF_SMB_ASSIGN_OR_RETURN(server->listener_, transport->Listen(address, server.get()));
  return server;
}

Server::~Server() {
  // Its threads are the parent's: a forked child can only forget them.
  if (fork_guard_.InForkedChild()) static_cast<void>(listener_.release());
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
  return Refuse(InvalidArgumentError("a server takes requests, not replies"));
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
          "' has " + std::to_string(segment->CountLive()) + " live workers on it"));
    }
    segments_.erase(found);
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
  options.lease_s = lease_s_;
  options.layout = request.layout;
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
  return NotFoundError("there is no segment '" + name + "' at " + listener_->address() + "; it has " +
                       (names.empty() ? "none" : names));
}

std::vector<SegmentSummary> Server::ListLocked() {
  std::vector<SegmentSummary> summaries;
  for (const auto& [name, segment] : segments_) {
    segment->Reap();
    summaries.push_back({name, segment->job_id(),
                         segment->layout().num_elements() * sizeof(float), segment->CountLive()});
  }
  return summaries;
}

}  // namespace tf_smb
