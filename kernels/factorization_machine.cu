// What: out[b] = sum over pairs of features of X[b, r] . X[b, c], X = [dense if DENSE, sparse],
//   FEATURES rows of WIDTH a sample. A column adds each of its numbers times the sum of those
//   before it. Back: dX[b, f] = grad[b] (sum over all features - X[b, f]). Floats of 16 bits are
//   widened, sums are float32, gradients rounded once.
// Who does what: LANES lanes have a sample, each VECTOR columns of all its features, LANES * VECTOR
//   columns at a time. Forward, loads of BATCH features are in flight, and lanes add up what they
//   have by shuffles. Backward, BATCH is FEATURES, which stay in registers between the sum and the
//   gradient; of more than fit there each is read twice.
// Assumes: VECTOR divides WIDTH, and X and dX are aligned to VECTOR numbers; LANES is a power of
//   two up to 32.
// Moves: forward F D numbers and 4 bytes a sample, backward 2 F D numbers and 4 bytes. Sums of the
//   forward pass, kept, would be D floats a sample more each way, where X is read anyway.
// Tried: of F = 27, D = 128, registers, warps of a multiprocessor and KB of loads in flight there:
//   forward: 32, 64, 288; of 16 bits 40, 48, 216. With 14 features at once, two of the last 14
//     beyond the end: two thirds more instructions; with all 27: a tenth fewer, 648 KB
//   backward: 128, 16, 218; of 16 bits with 8 columns a lane 254, 8, 109, with 4, kept: 126, 16,
//     110, for what is held is held widened
//   backward with 2 columns a lane: 80, 24, 165, and 14 % more instructions
//   D = 16 with 4 columns a lane, so 4 lanes a sample: a batch of 65,536 is .97 waves of an H100
#include "halves.cuh"

namespace {

constexpr int PIECES = WIDTH / VECTOR;

using Piece = Numbers<value_t, VECTOR>;

// A piece of a feature of this sample, or of its gradient.
template <typename T>
__device__ __forceinline__ T* piece_of(T* dense, T* sparse, int64_t sample, int feature,
                                       int piece) {
    if (DENSE && feature == 0) return dense + sample * WIDTH + piece * VECTOR;
    return sparse + (sample * (FEATURES - DENSE) + feature - DENSE) * WIDTH + piece * VECTOR;
}

// Features [first, first + BATCH), zeros beyond the last.
__device__ __forceinline__ void read(const value_t* dense, const value_t* sparse, int64_t sample,
                                     int first, int piece, Piece (&rows)[BATCH]) {
#pragma unroll
    for (int f = 0; f < BATCH; ++f) {
        rows[f] = {};
        if (FEATURES % BATCH == 0 || first + f < FEATURES) {
            const value_t* from = piece_of(dense, sparse, sample, first + f, piece);
            rows[f] = *reinterpret_cast<const Piece*>(from);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    factorization_machine_forward(const value_t* dense, const value_t* sparse, float* out,
                                  int64_t batch) {
    const int lane = threadIdx.x % LANES;
    const int64_t sample = thread_number() / LANES;
    float pairs = 0.0f;
    for (int piece = lane; piece < PIECES && sample < batch; piece += LANES) {
        Floats<VECTOR> sum = {};
#pragma unroll 1
        for (int first = 0; first < FEATURES; first += BATCH) {
            Piece rows[BATCH];
            read(dense, sparse, sample, first, piece, rows);
#pragma unroll
            for (int f = 0; f < BATCH; ++f) {
#pragma unroll
                for (int n = 0; n < VECTOR; ++n) {
                    const float x = widened(rows[f].at[n]);
                    pairs = fmaf(x, sum.at[n], pairs);
                    sum.at[n] += x;
                }
            }
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) pairs += __shfl_xor_sync(FULL, pairs, step);
    if (lane == 0 && sample < batch) out[sample] = pairs;
}

extern "C" __global__ void __launch_bounds__(256)
    factorization_machine_backward(const float* grad, const value_t* dense, const value_t* sparse,
                                   value_t* ddense, value_t* dsparse, int64_t batch) {
    const int64_t sample = thread_number() / LANES;
    if (sample >= batch) return;
    const float g = grad[sample];
    for (int piece = threadIdx.x % LANES; piece < PIECES; piece += LANES) {
        Piece rows[BATCH];
        Floats<VECTOR> sum = {};
#pragma unroll 1
        for (int first = 0; first < FEATURES; first += BATCH) {
            read(dense, sparse, sample, first, piece, rows);
#pragma unroll
            for (int f = 0; f < BATCH; ++f) {
#pragma unroll
                for (int n = 0; n < VECTOR; ++n) sum.at[n] += widened(rows[f].at[n]);
            }
        }
#pragma unroll 1
        for (int first = 0; first < FEATURES; first += BATCH) {
            if (BATCH < FEATURES) read(dense, sparse, sample, first, piece, rows);
#pragma unroll
            for (int f = 0; f < BATCH; ++f) {
                if (FEATURES % BATCH != 0 && first + f >= FEATURES) break;
                Floats<VECTOR> dx;
#pragma unroll
                for (int n = 0; n < VECTOR; ++n)
                    dx.at[n] = g * (sum.at[n] - widened(rows[f].at[n]));
                store(piece_of(ddense, dsparse, sample, first + f, piece), dx);
            }
        }
    }
}
