// Where embedding rows lie and how their vectors are read and written, see
// cupyrec/ops/embedding_rows.py. The macro VALUE names the format of vectors, float32 without it.
#pragma once
#include "common.cuh"
#include "stochastic_rounding.cuh"
#define INT8 3
#if VALUE == INT8
#include "int8_codec.cuh"
#endif

#if VALUE == INT8
constexpr int SCALE_WORDS = 1;  // before the numbers
#else
constexpr int SCALE_WORDS = 0;
#endif

#if VALUE == FLOAT32
using Value = float;
#elif VALUE == INT8
using Value = int8_t;

// N consecutive codes, moved by one instruction where N is 1, 2 or 4 and the address allows it.
template <int N>
struct alignas(N) Int8Codes {
    int8_t at[N];
};
#else
using Value = Code;

template <int N>
__device__ __forceinline__ Floats<N> load(const Code* from) {
    const Codes<N> codes = *reinterpret_cast<const Codes<N>*>(from);
    Floats<N> values;
#pragma unroll
    for (int i = 0; i < N; ++i) values.at[i] = widened(codes.at[i]);
    return values;
}

template <int N>
__device__ __forceinline__ void store(Code* to, const Floats<N>& values, const Chances<N>& r) {
    Codes<N> codes;
#pragma unroll
    for (int i = 0; i < N; ++i) codes.at[i] = rounded(values.at[i], r.at[i]);
    *reinterpret_cast<Codes<N>*>(to) = codes;
}
#endif

// Words of a vector; behind them lies the state.
constexpr __device__ int vector_words(int width) {
    return SCALE_WORDS + (width * static_cast<int>(sizeof(Value)) + 3) / 4;
}

// Row number `row`: row % 2^k of chunk row / 2^k, `stride` words each.
__device__ __forceinline__ float* row_at(const uint64_t* chunks, int k, int stride, int64_t row) {
    const int64_t within = row & ((int64_t(1) << k) - 1);
    return reinterpret_cast<float*>(chunks[row >> k]) + within * stride;
}

// Where the vectors of values lie, each LENGTH numbers: of value i in row rows[inverse[i]], or in
// `unseen`, of floats, where that is -1 - j. An address is odd if floats lie there, not Values, and
// 0 for padding, of inverse -1, whose vector is zero.
struct ValueVectors {
    const uint64_t* chunks;
    int k, stride;
    const int64_t* rows;
    const int64_t* inverse;
    const float* unseen;

    template <int LENGTH>
    __device__ __forceinline__ uint64_t address(int64_t i) const {
        const int64_t u = inverse[i];
        if (u < 0) return 0;
        const int64_t row = rows[u];
        if (row >= 0) return reinterpret_cast<uint64_t>(row_at(chunks, k, stride, row));
        return reinterpret_cast<uint64_t>(unseen + (-1 - row) * LENGTH) + (VALUE != FLOAT32);
    }
};

// N columns, from number `column` on, of the vector at such an address.
template <int N>
__device__ __forceinline__ Floats<N> columns_at(uint64_t address, int column) {
#if VALUE != FLOAT32
    if (address & 1) return load<N>(reinterpret_cast<const float*>(address - 1) + column);
#endif
#if VALUE == INT8
    const float scale = *reinterpret_cast<const float*>(address);
    const auto codes = *reinterpret_cast<const Int8Codes<N>*>(address + 4 * SCALE_WORDS + column);
    const float step = step_of(scale);  // behind the loads, so that both are on their way
    Floats<N> values;
#pragma unroll
    for (int i = 0; i < N; ++i) values.at[i] = ieee_mul(__int2float_rn(codes.at[i]), step);
    if (step < __uint_as_float(SMALLEST)) {  // else no product is so small
#pragma unroll
        for (int i = 0; i < N; ++i) values.at[i] = decoded(codes.at[i], step);
    }
    return values;
#else
    return load<N>(reinterpret_cast<const Value*>(address) + column);
#endif
}

#if VALUE != INT8  // which is only read

// What vectors of 16 bits are rounded by: the keys of the rows, the store's seed, the step.
struct Rounding {
    const uint32_t* tables;
    const int64_t* ids;
    uint64_t seed;
    uint32_t step;
};

// N columns of a vector, which are loaded and stored as floats, whatever lies there.
template <int N>
struct VectorPiece {
    Value* at;
    int column;
    uint32_t table, step;
    int64_t id;
    uint64_t seed;
};

template <int N>
__device__ __forceinline__ Floats<N> load(const VectorPiece<N>& from) {
    return load<N>(from.at);
}

template <int N>
__device__ __forceinline__ void store(const VectorPiece<N>& to, const Floats<N>& values) {
#if VALUE == FLOAT32
    store(to.at, values);
#else
    store(to.at, values, chances<N>(to.id, to.table, to.seed, to.step, to.column));
#endif
}

// N columns of a row of LENGTH, a thread's to update: consecutive threads have consecutive ones.
template <int LENGTH, int N>
struct RowPiece {
    int64_t number = thread_number();  // times N: where its gradient lies
    int64_t u = number / (LENGTH / N);
    int column = static_cast<int>(number - u * (LENGTH / N)) * N;

    __device__ __forceinline__ VectorPiece<N> vector(float* row, const Rounding& by) const {
        Value* at = reinterpret_cast<Value*>(row) + column;
#if VALUE == FLOAT32
        return {at};
#else
        return {at, column, by.tables[u], by.step, by.ids[u], by.seed};
#endif
    }

    // Of a part of the state that has LENGTH columns, `part` such parts behind the vector.
    __device__ __forceinline__ float* state(float* row, int part = 0) const {
        return row + vector_words(LENGTH) + part * LENGTH + column;
    }
};

#endif
