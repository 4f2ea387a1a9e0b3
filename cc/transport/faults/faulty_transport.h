// FaultyTransport: any transport, with what a FaultPlan says going wrong at the client.
#ifndef TF_SMB_CC_TRANSPORT_FAULTS_FAULTY_TRANSPORT_H_
#define TF_SMB_CC_TRANSPORT_FAULTS_FAULTY_TRANSPORT_H_

#include <memory>
#include <utility>

#include "cc/transport/faults/fault_plan.h"
#include "cc/transport/transport.h"

namespace tf_smb {

class FaultyTransport : public Transport {
 public:
  // `inner` must outlive this.
  FaultyTransport(Transport* inner, std::shared_ptr<FaultPlan> plan)
      : inner_(inner), plan_(std::move(plan)) {}

  const char* scheme() const override { return inner_->scheme(); }
  Viability IsViable() const override { return inner_->IsViable(); }
  Capabilities capabilities() const override { return inner_->capabilities(); }
  Result<std::unique_ptr<Listener>> Listen(const Address& address,
                                           RequestHandler* handler) override {
    return inner_->Listen(address, handler);
  }
  Result<std::unique_ptr<Connection>> Connect(const Address& address,
                                              const Deadline& deadline) override;

 private:
  Transport* const inner_;
  const std::shared_ptr<FaultPlan> plan_;
};

// The same for a link, or a connection, that is there already.
std::unique_ptr<Connection> MakeFaulty(std::unique_ptr<Connection> inner,
                                       std::shared_ptr<FaultPlan> plan);
std::unique_ptr<SegmentLink> MakeFaulty(std::unique_ptr<SegmentLink> inner,
                                        std::shared_ptr<FaultPlan> plan);

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_FAULTS_FAULTY_TRANSPORT_H_
