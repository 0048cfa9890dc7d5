// What: out[u] = sum over p in offsets[u] .. offsets[u + 1] - 1 of x[i], i = positions[p]; if
//   INDEXED of x[index[i]], if WEIGHTED times weights[i]. By a tree: a chunk of 32 rows adds up
//   each run of rows of one segment in it; a run that began in an earlier chunk is the chunk's
//   head. The chunk in which the segment began adds its heads in that block. What reaches a block
//   from an earlier one is the block's head, kept in `heads`; of all blocks that have a part of a
//   segment, the last to be done adds the heads to out[u]. So each sum has one order, whoever is
//   last. Where x is of 16 bits it is widened.
// Who does what: LANES lanes have a chunk, each VECTOR columns of it, LANES * VECTOR at a time; a
//   block has 8 warps. Warp 0 looks for the segment of the block's first row by a search in 32
//   parts, flags in shared memory tell where others begin. Of a segment's heads each LANES lanes of
//   the last block add up every CHUNKS-th.
// Assumes: offsets ascend strictly from 0 to n; VECTOR divides DIM, x, heads and out are aligned
//   to VECTOR numbers; LANES is a power of two from 4 to 32; `arrived` has a word a block.
// Moves: x, positions, index, weights, offsets read once, out written; of a block that a segment
//   reaches, a head written and read.
// Tried: 6,656 keys, half of them unique, Zipf 1.2, DIM 128: bytes 1.01 of the ideal, sectors 1.03,
//   the longest warp 1.2 of the mean. Heads of all chunks kept in memory and added up 32 at a time
//   by one launch more a level: 1.04 and 1.09 in 3 launches. A chunk's head in registers until all
//   have theirs: 9 % more instructions, and with weights 8 bytes spilled. BATCH 4, 8, 16, 32:
//   1,480, 1,287, 1,209, 1,168 instructions a warp but 39, 62, 88, 150 registers on sm_90; 8 have
//   most bytes in flight. `rows` without its column of padding: DIM 16 has 60 % bank conflicts
//   instead of 0.2 %. With weights, each vector multiplied where it is loaded: 16 KB an SM in
//   flight instead of 144.
#include "halves.cuh"
#include "look_back.cuh"

constexpr int ROWS = 32;               // of a chunk: a bit each in a word
constexpr int CHUNKS = 256 / LANES;    // of a block
constexpr int OF_WARP = WARP / LANES;  // chunks of a warp
constexpr int BATCH = 8;               // loads of a lane in flight
constexpr int OF_BLOCK = CHUNKS * ROWS;
constexpr int COLUMNS = LANES * VECTOR;

namespace {

using Vector = Floats<VECTOR>;

// What the lanes of a chunk know of it.
struct Chunk {
    const int64_t* rows;   // where each lies in x
    const float* weights;  // of each, if WEIGHTED
    unsigned starts;       // bit j: a run begins in row j; without bit 0 the first run is the head
    int count;             // rows that are there
    int64_t segment;       // of the first row
};

__device__ __forceinline__ void add(Vector& sum, const Vector& values) {
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) sum.at[l] += values.at[l];
}

// Adds up the runs of a chunk and returns the last one; of those before it a head goes to `head`,
// others are written to out.
__device__ __forceinline__ Vector add_up(const Chunk& chunk, const value_t* x, int column,
                                         Vector& head, float* out) {
    Vector sum = {};
    int64_t segment = chunk.segment;
    bool is_head = !(chunk.starts & 1);
    for (int j = 0; j < ROWS; j += BATCH) {
        Numbers<value_t, VECTOR> pieces[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t row = j + b < chunk.count ? chunk.rows[j + b] : -1;
            pieces[b] = {};
            if (row >= 0)
                pieces[b] =
                    *reinterpret_cast<const Numbers<value_t, VECTOR>*>(x + row * DIM + column);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (j + b >= chunk.count) continue;
            Vector values = widened(pieces[b]);
            if (WEIGHTED) {
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) values.at[l] *= chunk.weights[j + b];
            }
            if (j + b == 0) {
                sum = values;
            } else if (chunk.starts >> (j + b) & 1) {
                if (is_head) {
                    head = sum;
                } else {
                    store(out + segment * DIM + column, sum);
                }
                segment += 1;
                is_head = false;
                sum = values;
            } else {
                add(sum, values);
            }
        }
    }
    return sum;
}

// The last u with offsets[u] <= p; all lanes of a warp ask for the same p.
__device__ int64_t segment_of(const int64_t* offsets, int64_t segments, int64_t p) {
    const int lane = threadIdx.x % WARP;
    int64_t low = 0, high = p + 1 < segments ? p + 1 : segments;  // offsets[u] >= u
    while (high - low > 1) {
        const int64_t step = (high - low + WARP - 1) / WARP, at = low + lane * step;
        const unsigned below = __ballot_sync(FULL, at < high && offsets[at] <= p);
        low += (__popc(below) - 1) * step;
        high = low + step < high ? low + step : high;
    }
    return low;
}

// Whether all other blocks that have a part of the segment from row `first` on are done.
__device__ bool is_last(int64_t first, int64_t stop, uint64_t* arrived, uint64_t stamp) {
    const int64_t begun = first / OF_BLOCK, others = (stop - 1) / OF_BLOCK - begun;
    __threadfence();
    const bool last = next_number(arrived + begun, stamp) == others;
    __threadfence();
    return last;
}

// Adds to a segment's sum what the heads of the blocks hold that it reaches; for a whole block.
__device__ void add_heads(int64_t first, int64_t stop, const float* heads, Vector* parts,
                          float* to) {
    const int64_t begun = first / OF_BLOCK, others = (stop - 1) / OF_BLOCK - begun;
    const int c = threadIdx.x / LANES;
    for (int start = 0; start < DIM; start += COLUMNS) {
        const int column = start + threadIdx.x % LANES * VECTOR;
        Vector sum;
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) sum.at[l] = -0.0f;  // which changes no bit of a sum
        if (column < DIM) {
#pragma unroll 4
            for (int64_t i = begun + 1 + c; i <= begun + others; i += CHUNKS) {
                add(sum, load<VECTOR>(heads + i * DIM + column));
            }
        }
        parts[threadIdx.x] = sum;
        __syncthreads();
        if (c == 0 && column < DIM) {
            sum = load<VECTOR>(to + column);
            for (int part = 0; part < CHUNKS && part < others; ++part) {
                add(sum, parts[part * LANES + threadIdx.x]);
            }
            store(to + column, sum);
        }
        __syncthreads();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, WEIGHTED ? 3 : 4)
    segment_sum(const value_t* x, const int64_t* offsets, const int64_t* positions,
                const int64_t* index, const float* weights, float* heads, uint64_t* arrived,
                uint64_t stamp, float* out, int64_t segments, int64_t n) {
    __shared__ int64_t rows[CHUNKS][ROWS + 1];  // one more, so that chunks lie in other banks
    __shared__ float factors[WEIGHTED ? CHUNKS : 1][ROWS + 1];
    __shared__ uint8_t flags[OF_BLOCK];
    __shared__ unsigned starts[CHUNKS];
    __shared__ int64_t first_segment;
    __shared__ Vector parts[256];    // heads of the chunks
    __shared__ int64_t finished[2];  // segments of which this block is the last to be done
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t block_first = int64_t(blockIdx.x) * OF_BLOCK;
    const int of_block = n - block_first < OF_BLOCK ? int(n - block_first) : OF_BLOCK;
#pragma unroll
    for (int q = 0; q < OF_WARP; ++q) {
        const int at = (warp * OF_WARP + q) * ROWS + lane;
        if (at < of_block) {
            const int64_t i = positions[block_first + at];
            rows[warp * OF_WARP + q][lane] = INDEXED ? index[i] : i;
            if (WEIGHTED) factors[warp * OF_WARP + q][lane] = weights[i];
        }
        flags[at] = 0;
    }
    if (warp == 0) {
        const int64_t found = segment_of(offsets, segments, block_first);
        if (lane == 0) first_segment = found;
    }
    __syncthreads();
    for (int64_t u = first_segment + threadIdx.x; u < segments; u += 256) {
        const int64_t at = offsets[u] - block_first;
        if (at >= of_block) break;
        if (at >= 0) flags[at] = 1;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < OF_WARP; ++q) {
        const unsigned word = __ballot_sync(FULL, flags[(warp * OF_WARP + q) * ROWS + lane]);
        if (lane == 0) starts[warp * OF_WARP + q] = word;
    }
    __syncthreads();
    const int c = threadIdx.x / LANES;
    int before = 0, begun = 0;  // segments that begin in earlier chunks of the block, and in it
#pragma unroll
    for (int i = lane; i < CHUNKS; i += WARP) {
        begun += __popc(starts[i]);
        if (i < warp * OF_WARP) before += __popc(starts[i]);
    }
    before = __reduce_add_sync(FULL, before);
    begun = __reduce_add_sync(FULL, begun);
    for (int i = warp * OF_WARP; i < c; ++i) before += __popc(starts[i]);
    const int whole = static_cast<int>(starts[0] & 1);  // whether a segment begins with the block
    const int own = static_cast<int>(starts[c] & 1);
    const float* of_chunk = WEIGHTED ? factors[c] : nullptr;
    const Chunk chunk = {rows[c], of_chunk, starts[c], of_block - c * ROWS,
                         first_segment + before + own - whole};
    const int64_t segment = chunk.segment + __popc(chunk.starts) - own;  // of the last row
    float* block_head = heads + int64_t(blockIdx.x) * DIM;
    for (int start = 0; start < DIM; start += COLUMNS) {
        const int column = start + threadIdx.x % LANES * VECTOR;
        const bool there = chunk.count > 0 && column < DIM;
        Vector sum = {};
        if (there) sum = add_up(chunk, x, column, parts[threadIdx.x], out);
        if (there && !chunk.starts) parts[threadIdx.x] = sum;
        __syncthreads();
        if (there && c == 0 && chunk.starts && !own) store(block_head + column, parts[threadIdx.x]);
        if (there && (c == 0 || chunk.starts)) {
            for (int i = c + 1; i * ROWS < of_block && !(starts[i] & 1); ++i) {
                add(sum, parts[i * LANES + threadIdx.x % LANES]);
                if (starts[i]) break;
            }
            store((chunk.starts ? out + segment * DIM : block_head) + column, sum);
        }
        __syncthreads();
    }
    if (threadIdx.x < 2) {  // the segment that reaches the block, and the one that goes beyond
        const bool reaches = threadIdx.x == 0;
        const int64_t u = first_segment + (reaches ? 0 : begun - whole);
        const int64_t first = offsets[u], stop = offsets[u + 1];
        const bool shared =
            reaches ? first < block_first : first >= block_first && stop > block_first + OF_BLOCK;
        finished[threadIdx.x] = shared && is_last(first, stop, arrived, stamp) ? u : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int64_t u = finished[i];
        if (u >= 0) add_heads(offsets[u], offsets[u + 1], heads, parts, out + u * DIM);
    }
}
