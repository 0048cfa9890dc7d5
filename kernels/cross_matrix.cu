// What: y = x0 * z + x; backward dz = dy * x0, rounded to value_t, and dx0 = dy * z.
// Who does what: a thread has VECTOR columns of a row, of FILLED columns of dz, whose last ones
// from
//   COLUMNS on are 0.
// Assumes: VECTOR divides COLUMNS and FILLED, all arrays are aligned to VECTOR numbers.
// Moves: each number once.
// Tried: nothing else; z is written by one matmul, and dz read by two.
#include "halves.cuh"

extern "C" __global__ void __launch_bounds__(256)
    cross_matrix(const float* z, const float* x0, const float* x, float* y, int64_t count) {
    const int64_t at = thread_number() * VECTOR;
    if (at >= count) return;
    const auto factors = load<VECTOR>(x0 + at), added = load<VECTOR>(x + at);
    auto values = load<VECTOR>(z + at);
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) {
        values.at[l] = fmaf(factors.at[l], values.at[l], added.at[l]);
    }
    store(y + at, values);
}

extern "C" __global__ void __launch_bounds__(256)
    cross_matrix_backward(const float* dy, const float* z, const float* x0, value_t* dz, float* dx0,
                          int64_t count) {
    const int64_t to = thread_number() * VECTOR;  // in dz
    if (to >= count) return;
    const int64_t column = to % FILLED;
    const int64_t at = FILLED > COLUMNS ? to / FILLED * COLUMNS + column : to;
    if (FILLED > COLUMNS && column >= COLUMNS) {
        store(dz + to, Floats<VECTOR>{});
        return;
    }
    const auto grad = load<VECTOR>(dy + at), values = load<VECTOR>(z + at);
    const auto factors = load<VECTOR>(x0 + at);
    Floats<VECTOR> below, beside;
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) {
        below.at[l] = grad.at[l] * factors.at[l];
        beside.at[l] = grad.at[l] * values.at[l];
    }
    store(dz + to, below);
    store(dx0 + at, beside);
}
