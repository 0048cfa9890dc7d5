// Types, vectors of floats, and what every kernel asks about its place.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

constexpr int WARP = 32;
constexpr unsigned FULL = 0xFFFFFFFFu;  // mask of all lanes of a warp

// N consecutive floats, moved by one instruction where N is 1, 2 or 4 and the address allows it.
template <int N>
struct alignas(4 * N) Floats {
    float at[N];
};

template <int N>
__device__ __forceinline__ Floats<N> load(const float* from) {
    return *reinterpret_cast<const Floats<N>*>(from);
}

template <int N>
__device__ __forceinline__ void store(float* to, const Floats<N>& values) {
    *reinterpret_cast<Floats<N>*>(to) = values;
}

// Number of this thread within a grid along x.
__device__ __forceinline__ int64_t thread_number() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// The factor of all gradients: 1 without `scale`. NaN there means that a loss or a norm was not
// finite, and that nothing may be updated.
__device__ __forceinline__ float gradient_scale(const float* scale) {
    return scale ? *scale : 1.0f;
}

__device__ __forceinline__ bool is_nan(float x) { return x != x; }
