// The parts of the module tf_smb._smb.
#ifndef TF_SMB_CC_PYTHON_MODULE_H_
#define TF_SMB_CC_PYTHON_MODULE_H_

#include <pybind11/pybind11.h>

namespace tf_smb {

void DefineServer(pybind11::module_* module);
void DefineClient(pybind11::module_* module);
void DefineSegment(pybind11::module_* module);
void DefineTools(pybind11::module_* module);

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_MODULE_H_
