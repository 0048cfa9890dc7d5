// What: y = x rounded to the nearest number of y's type, ties to even, or widened; rows of y end in
//   zeros. `cast_rows` takes one matrix, `cast_matrices` several, each with zero rows at its end.
// Who does what: a thread makes PIECE consecutive numbers of a row of y, blocks of 256 threads make
//   consecutive ones. Of several matrices a thread looks for its own among their first pieces.
// Assumes: source_t and result_t are float or uint16_t, the bits of float16, or of bfloat16 with
//   the macro BRAIN; x and y are aligned to their elements. Where addresses and widths allow it, 16
//   bytes move at once.
// Moves: x read, y written, once each.
// Tried: B = 4096, N = 512: 1.00 of the ideal bytes and sectors from float to 16 bits and back; at
//   N = 13, padded to 16, 1.05: rows lie across sectors.
#include "halves.cuh"

namespace {

constexpr int PIECE = 8;  // 16 bytes of 16-bit numbers
constexpr int ENTRY = 5;  // numbers of a matrix in a table

struct Matrix {
    const source_t* x;
    result_t* y;
    int64_t rows, columns, stride;  // of x; numbers of a row of y
};

__device__ __forceinline__ bool is_aligned(const void* at, int64_t bytes) {
    return (reinterpret_cast<uint64_t>(at) | bytes) % 16 == 0;
}

// Columns [first, first + PIECE) of row x; 0 beyond its end.
__device__ __forceinline__ void read(const source_t* row, int64_t first, int64_t columns, bool wide,
                                     Floats<PIECE>& values) {
    constexpr int N = 16 / sizeof(source_t);
    if (wide && first + PIECE <= columns) {
#pragma unroll
        for (int i = 0; i < PIECE; i += N) {
            const auto part = *reinterpret_cast<const Numbers<source_t, N>*>(row + first + i);
#pragma unroll
            for (int j = 0; j < N; ++j) values.at[i + j] = widened(part.at[j]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; ++i)
            values.at[i] = first + i < columns ? widened(row[first + i]) : 0.0f;
    }
}

template <int N>
__device__ __forceinline__ void write(result_t* to, const Floats<PIECE>& values, int from) {
    Floats<N> part;
#pragma unroll
    for (int i = 0; i < N; ++i) part.at[i] = values.at[from + i];
    store(to + from, part);
}

__device__ __forceinline__ void cast(const Matrix& m, int64_t piece) {
    const int64_t of_row = (m.stride + PIECE - 1) / PIECE;
    const int64_t row = piece / of_row, first = piece % of_row * PIECE;
    Floats<PIECE> values = {};
    if (row < m.rows)
        read(m.x + row * m.columns, first, m.columns, is_aligned(m.x, m.columns * sizeof(source_t)),
             values);
    result_t* to = m.y + row * m.stride + first;
    constexpr int N = 16 / sizeof(result_t);
    if (first + PIECE <= m.stride && is_aligned(m.y, m.stride * sizeof(result_t))) {
#pragma unroll
        for (int i = 0; i < PIECE; i += N) write<N>(to, values, i);
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; ++i)
            if (first + i < m.stride) write<1>(to, values, i);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    cast_rows(const source_t* x, result_t* y, int64_t rows, int64_t columns, int64_t stride,
              int64_t pieces) {
    const int64_t piece = thread_number();
    if (piece < pieces) cast({x, y, rows, columns, stride}, piece);
}

// table: of each matrix the address, rows and columns of x, the row stride of y, and the number of
// its first piece. x (rows, columns) is one more, from piece `last` on.
extern "C" __global__ void __launch_bounds__(256)
    cast_matrices(const int64_t* table, int count, const source_t* x, int64_t rows, int64_t columns,
                  int64_t last, result_t* y, int64_t pieces) {
    const int64_t piece = thread_number();
    if (piece >= pieces) return;
    Matrix own = {x, nullptr, rows, columns, (columns + PIECE - 1) / PIECE * PIECE};
    int64_t first = last;
    if (piece < last) {
        for (; count > 1 && table[ENTRY + 4] <= piece; --count) table += ENTRY;
        own = {reinterpret_cast<const source_t*>(table[0]), nullptr, table[1], table[2], table[3]};
        first = table[4];
    }
    own.y = y + first * PIECE;
    cast(own, piece - first);
}
