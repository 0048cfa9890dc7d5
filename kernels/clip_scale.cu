// What: scale = min(1, clip_norm / sqrt(sum of K squares)); NaN where that norm or the loss is
//   not finite. A `clip_norm` of inf clips nothing; a norm of 0 gives 1.
// Who does what: one thread adds the squares in their order, as the CPU does.
// Assumes: clip_norm > 0; K is the number of groups and one, so a few.
// Moves: 8 K + 4 bytes read, 4 written.
// Tried: nothing else: K is small, and one launch is what this costs.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32)
    clip_scale(const double* squares, int count, double clip_norm, const float* loss,
               float* scale) {
    if (threadIdx.x > 0) return;
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += squares[i];
    const double norm = sqrt(sum);
    const float factor = static_cast<float>(fmin(1.0, clip_norm / norm));
    const bool finite = isfinite(norm) && (!loss || isfinite(*loss));
    *scale = finite ? factor : __int_as_float(0x7FFFFFFF);
}
