// The one map between Status and TensorFlow's status.
#ifndef TF_SMB_CC_KERNELS_TF_STATUS_H_
#define TF_SMB_CC_KERNELS_TF_STATUS_H_

#include "cc/common/status.h"
#include "tensorflow/c/tf_status.h"

namespace tf_smb {

Status FromTensorFlow(const TF_Status* status);

// UNAVAILABLE becomes FAILED_PRECONDITION: TensorFlow replaces an op's UNAVAILABLE
// by INTERNAL, with its own words.
void ToTensorFlow(const Status& from, TF_Status* to);

}  // namespace tf_smb

// For tests, which find it in the op library: the TF_Code that ToTensorFlow sets for an
// error of this StatusCode.
extern "C" __attribute__((visibility("default"))) int tf_smb_tensorflow_code(int status_code);

#endif  // TF_SMB_CC_KERNELS_TF_STATUS_H_
