// Numbers of the 16-bit format that the macro VALUE names: widened to float32, and rounded from it
// at random; see cupyrec/ops/stochastic_rounding.py.
#pragma once
#include "ieee.cuh"
#include "philox.cuh"

#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2

// 16 random bits for each of N columns.
template <int N>
struct Chances {
    uint32_t at[N];
};

// Those of the columns from `column` on; N divides 8 and `column`.
template <int N>
__device__ __forceinline__ Chances<N> chances(int64_t id, uint32_t table, uint64_t seed,
                                              uint32_t step, int column) {
    const uint64_t key = seed + static_cast<uint64_t>(column / 8 + 1) * 0x9E3779B97F4A7C15u;
    const Words words =
        philox4x32(static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), table, step, key);
    Chances<N> r;
#pragma unroll
    for (int i = 0; i < N; ++i) {  // selected: registers have no index
        const int m = column % 8 + i;
        const uint32_t first = m & 4 ? words.at[2] : words.at[0];
        const uint32_t second = m & 4 ? words.at[3] : words.at[1];
        r.at[i] = ((m & 2 ? second : first) >> (m & 1) * 16) & 0xFFFF;
    }
    return r;
}

#if VALUE != FLOAT32
struct Code {
    uint16_t bits;
};

// N consecutive codes, moved by one instruction where N is 1, 2, 4 or 8 and the address allows it.
template <int N>
struct alignas(2 * N) Codes {
    Code at[N];
};

__device__ __forceinline__ Code rounded(float x, uint32_t r) {
    constexpr uint32_t INFINITE = VALUE == FLOAT16 ? 0x7C00 : 0x7F80;
    const uint32_t bits = __float_as_uint(x), a = bits & 0x7FFFFFFF;
    uint32_t code;
    if (VALUE == BFLOAT16) {
        code = (a + r) >> 16;
    } else if (a >= 0x38800000) {
        code = ((a + (r >> 3)) >> 13) - (112 << 10);
    } else {
        code = (__float2uint_rz(ieee_mul(__uint_as_float(a), 0x1p40f)) + r) >> 16;
    }
    if (code >= INFINITE) code = INFINITE - 1;
    if (a == 0x7F800000) code = INFINITE;
    code |= bits >> 16 & 0x8000;
    if (a > 0x7F800000) code = INFINITE | INFINITE >> 1;
    return {static_cast<uint16_t>(code)};
}

__device__ __forceinline__ float widened(Code code) {
    const uint32_t bits = code.bits;
    if (VALUE == BFLOAT16) return __uint_as_float(bits << 16);
    const float small = __uint_as_float((bits & 0x7FFF) << 13);  // the exponent is 112 too small
    uint32_t wide = __float_as_uint(ieee_mul(small, 0x1p112f));
    if ((bits & 0x7C00) == 0x7C00) wide |= 0x7F800000;
    return __uint_as_float(wide | (bits & 0x8000) << 16);
}
#endif
