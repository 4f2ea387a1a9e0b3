// Faulty channels: below the messages, what a bad network does.
#ifndef TF_SMB_CC_TRANSPORT_FAULTS_FAULTY_CHANNEL_H_
#define TF_SMB_CC_TRANSPORT_FAULTS_FAULTY_CHANNEL_H_

#include <memory>

#include "cc/transport/faults/fault_plan.h"
#include "cc/transport/message/channel.h"

namespace tf_smb {

std::unique_ptr<Channel> MakeFaulty(std::unique_ptr<Channel> inner,
                                    std::shared_ptr<FrameFaultPlan> plan);
// Makes channels that share the plan.
Dialer MakeFaulty(Dialer inner, std::shared_ptr<FrameFaultPlan> plan);

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_FAULTS_FAULTY_CHANNEL_H_
