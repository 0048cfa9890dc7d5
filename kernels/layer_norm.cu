// What: y = (x - mean) * rstd * weight + bias over the COLUMNS of each row, with its mean and rstd
//   = 1 / sqrt(variance + eps); dx = rstd * (g - mean of g - xhat * mean of g * xhat), with xhat =
//   (x - mean) * rstd and g = dy * weight; columns' sums of dy * xhat and of dy.
//   Statistics in two passes over registers: of the differences from a first mean, whose own mean
//   mends it (Chan, Golub and LeVeque 1983). Longer rows: chunks, put together by their formula.
// Who does what: LANES lanes of 256 have a row, of it up to HELD pieces of VECTOR columns a lane
//   at a time; forward ROWS rows at once, so that weight and bias are read less often. Backward a
//   block has `turns` rows for each of its groups of LANES, one after the other, and the sums of
//   its rows stay in registers; they are put together by shuffles, then over warps in order, as
//   the block's row of `parts`.
// Assumes: VECTOR divides COLUMNS, all arrays are aligned to VECTOR floats; LANES is a power of
//   two up to 32, or 256. Products and quotients are spelt, for the same bits of all architectures:
//   NVRTC for sm_100 would multiply by the inverse of a constant instead of dividing.
// Moves: each row of x is read and of y written once; backward each of x and dy read, of dx
//   written once, and 8 COLUMNS bytes a block of 32 rows or more written and read again (4 %).
//   Rows of more than 8,192 columns are read twice, and their sums lie in `parts` all along.
// Tried: 256 rows of 1,024 and 128: bytes 1.00 of the ideal forward, 1.04 backward; sectors 1.62
//   and 1.67, 1.11 and 2.17, of weight and bias read again from L1. ROWS so that a lane has 4 loads
//   in flight: 48 and 64 KB an SM. A warp for a row of 1,024 would hold 128 floats a lane in the
//   backward pass, as a block does for 8,192 (some 200 registers instead of 48). Rows in a loop
//   with 32 floats a lane, VECTOR 1: 8 bytes of spills on sm_90; hence 16.
#include "row_pieces.cuh"

extern "C" __global__ void __launch_bounds__(256)
    layer_norm(const float* x, const float* weight, const float* bias, float eps, float* y,
               float* mean, float* rstd, int64_t b) {
    const int column = threadIdx.x % LANES * VECTOR;
    const int64_t first = int64_t(blockIdx.x) * (GROUPS * ROWS) + threadIdx.x / LANES;
    Piece pieces[ROWS][HELD];
    float means[ROWS] = {}, squares[ROWS] = {};
    for (int start = 0; start < COLUMNS; start += CAPACITY) {
        read_rows(x, first, b, start, pieces);
        const float count = COLUMNS - start < CAPACITY ? COLUMNS - start : CAPACITY;
        float sums[ROWS] = {}, centred[2 * ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) sums[i] += pieces[i][j].at[l];
            }
        }
        row_sums(sums);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sums[i] = __fdiv_rn(sums[i], count);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                const bool there = start + j * SPAN + column < COLUMNS;
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    const float difference = there ? pieces[i][j].at[l] - sums[i] : 0.0f;
                    centred[2 * i] += difference;
                    centred[2 * i + 1] = fmaf(difference, difference, centred[2 * i + 1]);
                }
            }
        }
        row_sums(centred);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float rest = centred[2 * i], part = sums[i] + __fdiv_rn(rest, count);
            const float off = part - means[i], share = __fdiv_rn(count, start + count);
            means[i] = LOOPS ? fmaf(off, share, means[i]) : part;
            squares[i] += centred[2 * i + 1] - __fdiv_rn(rest * rest, count);
            if (LOOPS) squares[i] = fmaf(off * off * start, share, squares[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float variance = __fdiv_rn(squares[i], COLUMNS);
        variance = variance < 0.0f ? 0.0f : variance;  // NaN stays NaN
        squares[i] = __frcp_rn(__fsqrt_rn(variance + eps));
        const int64_t row = first + i * GROUPS;
        if (column == 0 && row < b) {
            mean[row] = means[i];
            rstd[row] = squares[i];
        }
    }
    for (int start = 0; start < COLUMNS; start += CAPACITY) {
        if (LOOPS) read_rows(x, first, b, start, pieces);
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int at = start + j * SPAN + column;
            if (at >= COLUMNS) break;
            const Piece factors = load<VECTOR>(weight + at), added = load<VECTOR>(bias + at);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int64_t row = first + i * GROUPS;
                Piece values;
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    const float xhat = (pieces[i][j].at[l] - means[i]) * squares[i];
                    values.at[l] = fmaf(xhat, factors.at[l], added.at[l]);
                }
                if (row < b) store(y + row * COLUMNS + at, values);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_backward(const float* x, const float* dy, const float* weight, const float* mean,
                        const float* rstd, float* dx, float* parts, int64_t b, int64_t turns) {
    const int column = threadIdx.x % LANES * VECTOR;
    float* part = parts + int64_t(blockIdx.x) * (2 * COLUMNS);
    Piece factors[HELD], dweight[HELD] = {}, dbias[HELD] = {};
    if (!LOOPS) read(weight, true, 0, factors);
    for (int64_t turn = blockIdx.x * turns; turn < (blockIdx.x + 1) * turns; ++turn) {
        if (turn * GROUPS >= b) break;  // for all of the block
        const int64_t row = turn * GROUPS + threadIdx.x / LANES;
        const bool there = row < b;
        const float centre = there ? mean[row] : 0.0f, scale = there ? rstd[row] : 0.0f;
        Piece xhat[HELD], grad[HELD];
        const auto read_both = [&](int start) {
            read(x + row * COLUMNS, there, start, xhat);
            read(dy + row * COLUMNS, there, start, grad);
            if (LOOPS) read(weight, true, start, factors);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    xhat[j].at[l] = (xhat[j].at[l] - centre) * scale;
                }
            }
        };
        float sums[2] = {};  // of g and of g * xhat
        for (int start = 0; start < COLUMNS; start += CAPACITY) {
            read_both(start);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    const float g = __fmul_rn(grad[j].at[l], factors[j].at[l]);
                    sums[0] += g;
                    sums[1] = fmaf(g, xhat[j].at[l], sums[1]);
                }
            }
        }
        row_sums(sums);
        sums[0] = __fdiv_rn(sums[0], COLUMNS);
        sums[1] = __fdiv_rn(sums[1], COLUMNS);
        for (int start = 0; start < COLUMNS; start += CAPACITY) {
            if (LOOPS) read_both(start);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                const int at = start + j * SPAN + column;
                if (at >= COLUMNS) break;
                if (LOOPS) kept_sums(part, at, turn == blockIdx.x * turns, dweight[j], dbias[j]);
                Piece values;
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    const float g = __fmul_rn(grad[j].at[l], factors[j].at[l]);
                    values.at[l] = scale * fmaf(-xhat[j].at[l], sums[1], g - sums[0]);
                    dweight[j].at[l] = fmaf(grad[j].at[l], xhat[j].at[l], dweight[j].at[l]);
                    dbias[j].at[l] += grad[j].at[l];
                }
                if (there) store(dx + row * COLUMNS + at, values);
                if (LOOPS) {
                    store(part + at, dweight[j]);
                    store(part + COLUMNS + at, dbias[j]);
                }
            }
        }
    }
    if (!LOOPS) add_rows(part, dweight, dbias);
}
