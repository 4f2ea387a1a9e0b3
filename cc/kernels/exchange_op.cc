#include "cc/kernels/exchange_op.h"

#include <cstdio>

#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_status.h"

namespace tf_smb {
namespace {

// outcome is a scalar; every delta has its local's shape.
void InferShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  constexpr int kFirstLocal = 3;
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

void InferScalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetOutput(context, 0, TF_ShapeInferenceContextScalar(context), status);
}

// The inputs that all ops have; all of them act on the segment.
TF_OpDefinitionBuilder* NewBuilder(const char* name) {
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddInput(builder, "handle: int64");
  TF_OpDefinitionBuilderAddInput(builder, "steps: int64");
  TF_OpDefinitionBuilderAddInput(builder, "batches: int64");
  TF_OpDefinitionBuilderSetIsStateful(builder, true);
  return builder;
}

void Register(const char* name, TF_OpDefinitionBuilder* builder) {
  TF_Status* const status = TF_NewStatus();
  TF_RegisterOpDefinition(builder, status);
  if (TF_GetCode(status) != TF_OK) {
    std::fprintf(stderr, "tf_smb: cannot register op %s: %s\n", name, TF_Message(status));
  }
  TF_DeleteStatus(status);
}

}  // namespace

void RegisterExchangeOps() {
  TF_OpDefinitionBuilder* const exchange = NewBuilder(kExchangeOpName);
  TF_OpDefinitionBuilderAddAttr(exchange, "T: list({float, double, half, bfloat16}) >= 1");
  TF_OpDefinitionBuilderAddInput(exchange, "local: T");
  TF_OpDefinitionBuilderAddOutput(exchange, "outcome: int32");
  TF_OpDefinitionBuilderAddOutput(exchange, "delta: T");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(exchange, &InferShapes);
  Register(kExchangeOpName, exchange);

  TF_OpDefinitionBuilder* const is_due = NewBuilder(kIsDueOpName);
  TF_OpDefinitionBuilderAddOutput(is_due, "due: bool");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(is_due, &InferScalar);
  Register(kIsDueOpName, is_due);
}

}  // namespace tf_smb
