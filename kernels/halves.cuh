// Numbers of the type that the macro value_t names: float, or uint16_t for the bits of float16, of
// bfloat16 with the macro BRAIN. They are widened to float, and rounded once to the nearest.
#pragma once
#include "common.cuh"

#undef HALF_TYPE  // of another specialisation in this file
#if BRAIN
#define HALF_TYPE "bf16"
#else
#define HALF_TYPE "f16"
#endif

// N consecutive numbers, moved by one instruction where the address allows it.
template <typename T, int N>
struct alignas(sizeof(T) * N) Numbers {
    T at[N];
};

__device__ __forceinline__ float widened(float x) { return x; }

__device__ __forceinline__ float widened(uint16_t x) {
#if BRAIN
    return __uint_as_float(static_cast<uint32_t>(x) << 16);
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#endif
}

template <typename T, int N>
__device__ __forceinline__ Floats<N> widened(const Numbers<T, N>& x) {
    Floats<N> wide;
#pragma unroll
    for (int i = 0; i < N; ++i) wide.at[i] = widened(x.at[i]);
    return wide;
}

// Two numbers side by side.
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
    uint32_t both;
    asm("cvt.rn." HALF_TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <int N>
__device__ __forceinline__ void store(uint16_t* to, const Floats<N>& x) {
    if constexpr (N == 1) {
        *to = static_cast<uint16_t>(rounded_pair(x.at[0], 0.0f));
    } else {
        Numbers<uint32_t, N / 2> words;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) words.at[i] = rounded_pair(x.at[2 * i], x.at[2 * i + 1]);
        *reinterpret_cast<Numbers<uint32_t, N / 2>*>(to) = words;
    }
}
