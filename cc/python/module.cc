// tf_smb._smb: the core, for Python. Thin: converts arguments, gives up the GIL
// around every call that can wait, turns a Status into an exception in one place.
// The public, documented classes are in tf_smb/*.py.
#include "cc/python/module.h"

#include "cc/python/bench_bindings.h"
#include "cc/python/exceptions.h"

namespace tf_smb {

PYBIND11_MODULE(_smb, module) {
  module.doc() = "The core of tf_smb; use the classes of the package tf_smb instead.";
  RegisterExceptions();
  DefineServer(&module);
  DefineSegment(&module);
  DefineClient(&module);
  DefineTools(&module);
  DefineBench(&module);
}

}  // namespace tf_smb
