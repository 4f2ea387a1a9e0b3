#include "cc/transport/message/message_service.h"

#include <system_error>
#include <utility>

namespace tf_smb {

void MessageService::Serve(std::unique_ptr<Channel> channel) {
  MutexLock lock(&mutex_);
  JoinDone();
  if (stopping_.load()) {
    channel->Close();
    return;
  }
  Served& served = served_.emplace_back();
  served.channel = std::move(channel);
  try {
    served.thread = std::thread([this, &served] { RunSession(&served); });
  } catch (const std::system_error&) {
    served.channel->Close();  // out of threads: the client sees its channel close
    served_.pop_back();
  }
}

void MessageService::RunSession(Served* served) {
  MessageSession(handler_, &attachments_, &stopping_).Run(served->channel.get());
  served->channel->Close();
  served->done.store(true);
}

void MessageService::JoinDone() {
  for (auto served = served_.begin(); served != served_.end();) {
    if (!served->done.load()) {
      ++served;
      continue;
    }
    served->thread.join();
    served = served_.erase(served);
  }
}

void MessageService::Stop() {
  std::list<Served> served;
  {
    MutexLock lock(&mutex_);
    stopping_.store(true);
    served.swap(served_);
  }
  for (Served& one : served) one.channel->Close();
  for (Served& one : served) one.thread.join();
}

}  // namespace tf_smb
