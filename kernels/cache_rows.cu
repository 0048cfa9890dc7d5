// What: fill: row slots[i] = the first STRIDE words of line i of `payloads`. take: line i = row
//   slots[i], then id, table and count, words 0, 1, 2 and 4 of the slot's record. See
//   cupyrec/ops/cache_rows.py.
// Who does what: a thread moves 4 pieces of 4 words, consecutive threads consecutive ones of a row.
// Assumes: no slot comes twice; chunks, records and payloads are aligned to 16 bytes, STRIDE is a
//   multiple of 4. Lines of negative slots are passed over.
// Moves: fill N (4 STRIDE + 8) bytes read, 4 N STRIDE written; take N (4 STRIDE + 28) read,
//   N (4 STRIDE + 16) written.
// Tried: see write_rows in embedding_rows.cu, whose division of the work this is.
#include "row_memory.cuh"

namespace {

constexpr int BATCH = 4, ROW = STRIDE / 4, LINE = ROW + 1;  // pieces

// Of the pieces of n lines, COLUMNS each, number `first` + 256 j.
template <int COLUMNS>
struct Pieces {
    int64_t first = int64_t(blockIdx.x) * (256 * BATCH) + threadIdx.x, line = first / COLUMNS;
    unsigned start = static_cast<unsigned>(first - line * COLUMNS);

    __device__ int64_t line_of(int j) const { return line + (start + j * 256) / COLUMNS; }
    __device__ int column_of(int j) const { return (start + j * 256) % COLUMNS; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    fill_rows(const uint64_t* chunks, int k, const int64_t* slots, const uint32_t* payloads,
              int64_t n) {
    const Pieces<ROW> pieces;
    const float* lines = reinterpret_cast<const float*>(payloads);
    Floats<4> held[BATCH];
    int64_t slot[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int64_t i = pieces.line_of(j);
        slot[j] = i < n ? slots[i] : -1;
        if (i < n) held[j] = load<4>(lines + (i * LINE + pieces.column_of(j)) * 4);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        if (slot[j] < 0) continue;
        store(row_at(chunks, k, STRIDE, slot[j]) + pieces.column_of(j) * 4, held[j]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    take_rows(const uint64_t* chunks, int k, const uint32_t* records, const int64_t* slots,
              uint32_t* payloads, int64_t n) {
    const Pieces<LINE> pieces;
    const float* keys = reinterpret_cast<const float*>(records);
    float* lines = reinterpret_cast<float*>(payloads);
    Floats<4> held[BATCH];
    int64_t slot[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const int64_t i = pieces.line_of(j);
        const int column = pieces.column_of(j);
        slot[j] = i < n ? slots[i] : -1;
        if (slot[j] < 0) continue;
        const float* row = row_at(chunks, k, STRIDE, slot[j]) + column * 4;
        held[j] = load<4>(column < ROW ? row : keys + slot[j] * 8);
        if (column == ROW) held[j].at[3] = keys[slot[j] * 8 + 4];
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        if (slot[j] < 0) continue;
        store(lines + (pieces.line_of(j) * LINE + pieces.column_of(j)) * 4, held[j]);
    }
}
