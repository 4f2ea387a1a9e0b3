// The native yardsticks of cc/bench, as functions of tf_smb._smb.
#ifndef TF_SMB_CC_PYTHON_BENCH_BINDINGS_H_
#define TF_SMB_CC_PYTHON_BENCH_BINDINGS_H_

#include <pybind11/pybind11.h>

namespace tf_smb {

void DefineBench(pybind11::module_* module);

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_BENCH_BINDINGS_H_
