// Calls on weights that lie in somebody else's device memory (borrowed_weight.h), by the paths that serve layers.
#pragma once
#include "borrowed_weight.h"
#include "cuda/weight.h"

namespace fp4linear::cuda {

// As the functions of the same names in weight.h; the weight's device is current. Neither allocates nor synchronises.
void run(PathId path, const BorrowedWeight& weight, const Problem& problem, const CallOptions& options, void* stream);
void fill_with_bias(const BorrowedWeight& weight, const Problem& problem, void* stream);

// Once a device and process: makes what a first call would have to, so that it may be captured. Cheap when repeated.
void prepare_device(int device);

}  // namespace fp4linear::cuda
