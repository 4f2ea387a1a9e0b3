#include "cc/kernels/exchange_op.h"

#include <cstdio>

#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_status.h"

namespace tf_smb {
namespace {

// outcome is a scalar; every delta has its local's shape.
void InferShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  constexpr int kFirstLocal = 2;
  TF_ShapeHandle* const shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextSetOutput(context, 0, TF_ShapeInferenceContextScalar(context), status);
  const int64_t num_inputs = TF_ShapeInferenceContextNumInputs(context);
  for (int i = kFirstLocal; i < num_inputs && TF_GetCode(status) == TF_OK; ++i) {
    TF_ShapeInferenceContextGetInput(context, i, shape, status);
    if (TF_GetCode(status) != TF_OK) break;
    TF_ShapeInferenceContextSetOutput(context, i - kFirstLocal + 1, shape, status);
  }
  TF_DeleteShapeHandle(shape);
}

}  // namespace

void RegisterExchangeOp() {
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(kExchangeOpName);
  TF_OpDefinitionBuilderAddAttr(builder, "T: list({float, double, half, bfloat16}) >= 1");
  TF_OpDefinitionBuilderAddInput(builder, "handle: int64");
  TF_OpDefinitionBuilderAddInput(builder, "steps: int64");
  TF_OpDefinitionBuilderAddInput(builder, "local: T");
  TF_OpDefinitionBuilderAddOutput(builder, "outcome: int32");
  TF_OpDefinitionBuilderAddOutput(builder, "delta: T");
  TF_OpDefinitionBuilderSetIsStateful(builder, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, &InferShapes);
  TF_Status* const status = TF_NewStatus();
  TF_RegisterOpDefinition(builder, status);
  if (TF_GetCode(status) != TF_OK) {
    std::fprintf(stderr, "tf_smb: cannot register op %s: %s\n", kExchangeOpName,
                 TF_Message(status));
  }
  TF_DeleteStatus(status);
}

}  // namespace tf_smb
