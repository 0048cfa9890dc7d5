// What: pool_rows: out[m] = sum over values i of bag m of weights[i] * vector(i), in their order;
//   MEAN: over their count; vector(i) is that of row rows[inverse[i]], or of `unseen` where that is
//   -1 - j; values of inverse -1 don't count. weight_gradient: out[i] = grad[bags[i]] .
//   vector(i). bag_numbers: the bag of each value.
// Who does what: LANES lanes have a bag, or LANES values, each VECTOR columns, LANES * VECTOR at a
//   time. Of LANES values each lane looks up the address of one (inverse -> rows -> chunk), once a
//   value and stretch of columns; the lanes get it by a shuffle, BATCH loads of a lane in flight.
//   A product is added up over the lanes in a tree of shuffles. bag_numbers: a thread a value
//   searches the offsets.
// Assumes: offsets ascend from 0 to the number of values; VECTOR divides DIM, unseen, out and grad
//   are aligned to VECTOR floats; chunks are aligned to 16 bytes, a stride is a multiple of 4
//   floats; LANES is a power of two from 4 to 32.
// Moves: pool_rows 8 N + 8 U + 4 U DIM + 8 M read (each row once, then from the caches; of INT8
//   U (DIM + 4) of rows), 4 N more with weights, 4 M DIM written; weight_gradient 16 N + 8 U + 4 U
//   DIM + 4 M DIM, 4 N written.
// Tried: 6,656 values in bags of 1 to 8, DIM 128: bytes 1.00 of the ideal. pool_rows with a BATCH
//   of 4, 8, 16: 341, 414, 640 thousand instructions, for most of a short bag's batch is empty; 4
//   have 102 KB an SM in flight. Without `4` in its launch bounds ptxas keeps to 32 or 40 registers
//   and spills for some widths of 16-bit rows. weight_gradient: 400, 407, 425 thousand. A bag has
//   one group, however long it is: a tree as of segment_sum would serve batches of few and large
//   bags, but takes the bags' numbers and a second launch.
#include "row_memory.cuh"

#ifdef LANES
namespace {

constexpr int BATCH = 4;  // loads of a lane in flight

// What lane j of this group of LANES holds.
template <typename T>
__device__ __forceinline__ T of_lane(T own, int j) {
    return __shfl_sync(FULL, own, j, LANES);
}

// VECTOR columns of a vector, zeros of padding's and behind the last.
__device__ __forceinline__ Floats<VECTOR> piece(uint64_t vector, int column) {
    return vector && column < DIM ? columns_at<VECTOR>(vector, column) : Floats<VECTOR>{};
}

}  // namespace

#ifdef MEAN
extern "C" __global__ void __launch_bounds__(256, 4)
    pool_rows(const uint64_t* chunks, int k, int stride, const int64_t* rows,
              const int64_t* inverse, const float* unseen, const int64_t* offsets,
              const float* weights, float* out, int64_t bags) {
    const ValueVectors values{chunks, k, stride, rows, inverse, unseen};
    const int lane = threadIdx.x % LANES;
    const int64_t m = thread_number() / LANES;
    const int64_t first = m < bags ? offsets[m] : 0, end = m < bags ? offsets[m + 1] : 0;
    for (int start = 0; start < DIM; start += LANES * VECTOR) {
        const int column = start + lane * VECTOR;
        Floats<VECTOR> sum = {};
        int64_t count = 0;  // values of the bag that are no padding
        for (int64_t i = first; __any_sync(FULL, i < end); i += LANES) {
            const uint64_t own = i + lane < end ? values.address<DIM>(i + lane) : 0;
            if (MEAN) {
                const unsigned present = __ballot_sync(FULL, own != 0);
                count += __popc(present >> (threadIdx.x % WARP - lane) & FULL >> (WARP - LANES));
            }
            const float own_weight = WEIGHTED && own ? weights[i + lane] : 1;
#pragma unroll
            for (int j = 0; j < LANES; j += BATCH) {
                if (!__any_sync(FULL, i + j < end)) break;
                Floats<VECTOR> pieces[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    pieces[b] = piece(of_lane(own, j + b), column);
                }
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const float weight = WEIGHTED ? of_lane(own_weight, j + b) : 1;
#pragma unroll
                    for (int l = 0; l < VECTOR; ++l) sum.at[l] += weight * pieces[b].at[l];
                }
            }
        }
        if (m >= bags || column >= DIM) continue;
        if (MEAN && count) {
#pragma unroll
            for (int l = 0; l < VECTOR; ++l) sum.at[l] /= static_cast<float>(count);
        }
        store(out + m * DIM + column, sum);
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
    weight_gradient(const uint64_t* chunks, int k, int stride, const int64_t* rows,
                    const int64_t* inverse, const float* unseen, const int64_t* bags,
                    const float* grad, float* out, int64_t n) {
    const ValueVectors values{chunks, k, stride, rows, inverse, unseen};
    const int lane = threadIdx.x % LANES;
    const int64_t i = thread_number();
    const uint64_t own = i < n ? values.address<DIM>(i) : 0;
    const int64_t own_bag = own ? bags[i] : -1;
    float product = 0;
#pragma unroll
    for (int j = 0; j < LANES; j += BATCH) {
        float sums[BATCH] = {};
        for (int start = 0; start < DIM; start += LANES * VECTOR) {
            const int column = start + lane * VECTOR;
            Floats<VECTOR> x[BATCH], y[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                x[b] = piece(of_lane(own, j + b), column);
                const int64_t bag = of_lane(own_bag, j + b);
                y[b] = {};
                if (bag >= 0 && column < DIM) y[b] = load<VECTOR>(grad + bag * DIM + column);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) sums[b] += x[b].at[l] * y[b].at[l];
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int apart = LANES / 2; apart; apart /= 2) {
                sums[b] += __shfl_xor_sync(FULL, sums[b], apart);
            }
            if (lane == j + b) product = sums[b];
        }
    }
    if (i < n) out[i] = product;
}
#endif

#else
extern "C" __global__ void __launch_bounds__(256)
    bag_numbers(const int64_t* offsets, int64_t bags, int64_t* numbers, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    int64_t low = 0, high = bags;  // offsets[low] <= i < offsets[high]
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (offsets[middle] <= i ? low : high) = middle;
    }
    numbers[i] = low;
}
#endif
