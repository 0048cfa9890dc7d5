// What: m = x . weight of each row, y = x0 * m + bias + x. Back: dm = dy . x0, dx = dm * weight +
// dy,
//   dx0 = dy * m, and columns' sums of dm * x and of dy.
// Who does what: a few lanes have a row, see row_pieces.cuh: forward ROWS rows at once, so that
//   weight and bias are read less often; backward a block has `turns` rows for each of its groups
//   of lanes, one after the other, and the sums of its rows stay in registers, until they are put
//   together as the block's row of `parts`.
// Assumes: VECTOR divides COLUMNS, all arrays are aligned to VECTOR floats.
// Moves: x and x0 are read once and y is written; backward dy, x0 and x are read, dx and dx0
// written,
//   and 8 COLUMNS bytes a block of 32 rows or more written and read again (3 %). Of rows of more
//   than 8,192 columns x or dy is read twice, and their sums lie in `parts` all along.
// Tried: x stays in registers from the first pass to the second, x0 is read in the second; backward
//   dy stays, for x beside it would be as many registers as layer_norm.cu's, and x0 more.
#include "row_pieces.cuh"

extern "C" __global__ void __launch_bounds__(256)
    cross_vector(const float* x, const float* x0, const float* weight, const float* bias, float* y,
                 float* products, int64_t b) {
    const int column = threadIdx.x % LANES * VECTOR;
    const int64_t first = int64_t(blockIdx.x) * (GROUPS * ROWS) + threadIdx.x / LANES;
    Piece pieces[ROWS][HELD];
    float sums[ROWS] = {};
    for (int start = 0; start < COLUMNS; start += CAPACITY) {
        read_rows(x, first, b, start, pieces);
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int at = start + j * SPAN + column;
            if (at >= COLUMNS) break;
            const Piece factors = load<VECTOR>(weight + at);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    sums[i] = fmaf(pieces[i][j].at[l], factors.at[l], sums[i]);
                }
            }
        }
    }
    row_sums(sums);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = first + i * GROUPS;
        if (column == 0 && row < b) products[row] = sums[i];
    }
    for (int start = 0; start < COLUMNS; start += CAPACITY) {
        if (LOOPS) read_rows(x, first, b, start, pieces);
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int at = start + j * SPAN + column;
            if (at >= COLUMNS) break;
            const Piece added = load<VECTOR>(bias + at);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int64_t row = first + i * GROUPS;
                Piece values = {};
                if (row < b) values = load<VECTOR>(x0 + row * COLUMNS + at);
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    const float rest = added.at[l] + pieces[i][j].at[l];
                    values.at[l] = fmaf(values.at[l], sums[i], rest);
                }
                if (row < b) store(y + row * COLUMNS + at, values);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    cross_vector_backward(const float* dy, const float* x, const float* x0, const float* weight,
                          const float* products, float* dx, float* dx0, float* parts, int64_t b,
                          int64_t turns) {
    const int column = threadIdx.x % LANES * VECTOR;
    float* part = parts + int64_t(blockIdx.x) * (2 * COLUMNS);
    Piece factors[HELD], dweight[HELD] = {}, dbias[HELD] = {};
    if (!LOOPS) read(weight, true, 0, factors);
    for (int64_t turn = blockIdx.x * turns; turn < (blockIdx.x + 1) * turns; ++turn) {
        if (turn * GROUPS >= b) break;  // for all of the block
        const int64_t row = turn * GROUPS + threadIdx.x / LANES, begin = row * COLUMNS;
        const bool there = row < b;
        const float product = there ? products[row] : 0.0f;
        Piece grad[HELD];
        float sums[1] = {};  // dm
        for (int start = 0; start < COLUMNS; start += CAPACITY) {
            read(dy + begin, there, start, grad);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                const int at = start + j * SPAN + column;
                if (!there || at >= COLUMNS) break;
                Piece values = load<VECTOR>(x0 + begin + at);
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    sums[0] = fmaf(grad[j].at[l], values.at[l], sums[0]);
                    values.at[l] = grad[j].at[l] * product;
                }
                store(dx0 + begin + at, values);
            }
        }
        row_sums(sums);
        for (int start = 0; start < COLUMNS; start += CAPACITY) {
            if (LOOPS) read(dy + begin, there, start, grad);
            if (LOOPS) read(weight, true, start, factors);
            Piece values[HELD];
            read(x + begin, there, start, values);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                const int at = start + j * SPAN + column;
                if (at >= COLUMNS) break;
                if (LOOPS) kept_sums(part, at, turn == blockIdx.x * turns, dweight[j], dbias[j]);
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    dweight[j].at[l] = fmaf(sums[0], values[j].at[l], dweight[j].at[l]);
                    dbias[j].at[l] += grad[j].at[l];
                    values[j].at[l] = fmaf(sums[0], factors[j].at[l], grad[j].at[l]);
                }
                if (there) store(dx + begin + at, values[j]);
                if (LOOPS) {
                    store(part + at, dweight[j]);
                    store(part + COLUMNS + at, dbias[j]);
                }
            }
        }
    }
    if (!LOOPS) add_rows(part, dweight, dbias);
}
