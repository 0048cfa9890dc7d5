// The int8 codec of one number: see cupyrec/ops/int8_codec.py.
#pragma once
#include "common.cuh"
#include "ieee.cuh"

constexpr uint32_t SMALLEST = 0x00800000u, INFINITE = 0x7F800000u;  // bits of 2^-126, of infinity

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The scale of a row, of which each of N lanes knows the largest magnitude that it has seen.
template <int N>
__device__ __forceinline__ uint32_t scale_bits(uint32_t most) {
    if (N == WARP) {
        most = __reduce_max_sync(FULL, most);
    } else {
#pragma unroll
        for (int other = N / 2; other > 0; other /= 2) {
            most = max(most, __shfl_xor_sync(FULL, most, other));
        }
    }
    if (most >= INFINITE) return 0x7FC00000u;  // NaN
    return most < SMALLEST ? 0 : most;
}

// Divides by a row's scale as __fdiv_rn does, where the quotient matters: below 2^-80 it may be off
// in its last bits, and the code is 0. The scale is brought to [2, 4) by a power of two, so that
// nothing on the way leaves the range of floats; then from the rounded inverse two steps of Newton
// give the rounded quotient (Markstein 1990).
struct Divisor {
    float power, scale, inverse;

    __device__ __forceinline__ explicit Divisor(uint32_t bits)
        : power(__uint_as_float((255u - (bits >> 23)) << 23)),
          scale(__fmul_rn(__uint_as_float(bits), power)),
          inverse(__frcp_rn(scale)) {}

    __device__ __forceinline__ float quotient(float x) const {
        const float scaled = __fmul_rn(x, power);
        float q = __fmul_rn(scaled, inverse);
        q = __fmaf_rn(__fmaf_rn(-q, scale, scaled), inverse, q);
        return __fmaf_rn(__fmaf_rn(-q, scale, scaled), inverse, q);
    }
};

// Halves away from zero: what lies just below a half stays below after the addition.
__device__ __forceinline__ int code_of(float x, const Divisor& divisor) {
    const float t = __fmul_rn(divisor.quotient(x), 127.0f);
    const uint32_t below_half = (__float_as_uint(t) & 0x80000000u) | 0x3EFFFFFFu;
    return __float2int_rz(__fadd_rn(t, __uint_as_float(below_half)));
}

// Rounded by 16 random bits. Where the quotient may be off it is lost in the sum.
__device__ __forceinline__ int code_at_random(float x, const Divisor& divisor, uint32_t r) {
    const float t = __fmul_rn(divisor.quotient(x), 127.0f);
    return __float2int_rd(__fadd_rn(t, __fmul_rn(__uint2float_rn(2 * r + 1), 0x1p-17f)));
}

// scale / 127, rounded once: the quotient is never so near to the middle of two floats that the
// error of a product in float64 would matter. A division would be a call, and spill registers.
__device__ __forceinline__ float step_of(float scale) {
    return ieee_float(static_cast<double>(scale) * (1.0 / 127.0));
}

__device__ __forceinline__ float decoded(int code, float step) {
    const float value = ieee_mul(__int2float_rn(code), step);
    return magnitude(value) < SMALLEST ? 0.0f : value;
}
