// Registers ops and kernels when TensorFlow loads the op library: it watches what
// the library's initialisers register while tf.load_op_library opens it.
#include "cc/kernels/exchange_op.h"

namespace tf_smb {
namespace {

__attribute__((constructor)) void RegisterAll() {
  RegisterExchangeOps();
  RegisterExchangeKernels();
}

}  // namespace
}  // namespace tf_smb
