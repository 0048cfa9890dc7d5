// What: encode_messages: row order[i] of x (row i without `order`) as number i of the rows of all
//   messages, one message a peer; zeros up to their ends. decode_messages: number i to row order[i]
//   of out. See cupyrec/ops/messages.py for what a message is.
// Who does what: LANES lanes have ROWS rows, of each up to BATCH pieces of VECTOR columns a lane at
//   a time. A lane looks for the peer of its first row among the first rows of all, and from there
//   on for those of the next. int8 is encoded as in int8_codec.cu: pieces stay in registers from
//   the maximum to the codes, but of rows with more than BATCH a lane, which are read again. The
//   lanes of a message's last row fill it up.
// Assumes: CODEC is one of those below, BRAIN and VALUE go with it; VECTOR divides DIM; x and out
//   are aligned to VECTOR floats, bytes to 16; LANES is a power of two; `peers` has of each peer
//   the number of its first row and the byte where its message starts, then those of the end.
// Moves: encode 4 N DIM bytes read, 8 N for `order`, 12 N for keys, each message written; decode
//   the reverse.
// Tried: 6,912 rows in any order, 8 peers: bytes 1.00 of the ideal; sectors 1.14 to 1.26, of DIM 16
//   with keys, which lie apart, 1.95. To look for the peer of each row among all instead: int8 of
//   DIM 128 takes 19 % more instructions to encode, 36 % more to decode, float16 55 % and 82 %.
#define NONE 0
#define FP16 1
#define BF16 2
#define INT8 3
#include "halves.cuh"
#include "int8_codec.cuh"
#include "stochastic_rounding.cuh"

namespace {

constexpr int PIECES = DIM / VECTOR, GROUPS = WARP / LANES;
constexpr int HELD = (PIECES + LANES - 1) / LANES;  // pieces of a row a lane
constexpr int BATCH = HELD < 8 ? HELD : 8;

#if CODEC == INT8
typedef int8_t number_t;
#elif CODEC == NONE
typedef float number_t;
#else
typedef uint16_t number_t;
#endif
typedef Numbers<number_t, VECTOR> Piece;

// Where a row lies in its message; `fill` is where the message ends if the row is its last.
template <typename Byte>
struct Place {
    Byte *scale, *numbers, *fill;
};

// The entry of the peer whose message has a row.
__device__ __forceinline__ const int64_t* peer_of(const int64_t* peers, int count, int64_t row) {
    int own = 0;
    while (count - own > 1) {
        const int middle = (own + count) / 2;
        (peers[2 * middle] <= row ? own : count) = middle;
    }
    return peers + 2 * own;
}

// Moves `peer` on to that of the row, which is not below those of its message.
template <typename Byte>
__device__ __forceinline__ Place<Byte> place(const int64_t*& peer, Byte* bytes, int64_t row) {
    while (peer[2] <= row) peer += 2;
    const int64_t rows = peer[2] - peer[0], i = row - peer[0];
    Byte* message = bytes + peer[1];
    Byte* numbers = message + (CODEC == INT8 ? 4 * rows : 0) + i * (DIM * sizeof(number_t));
    return {message + 4 * i, numbers, i + 1 == rows ? bytes + peer[3] : nullptr};
}

struct Lane {
    int column;     // of its first piece
    int64_t first;  // row; the next is GROUPS further
};

__device__ __forceinline__ Lane this_lane() {
    const int lane = threadIdx.x % WARP;
    return {lane % LANES * VECTOR, thread_number() / WARP * (GROUPS * ROWS) + lane / LANES};
}

#ifdef ENCODE
// What a row is encoded by.
struct Scale {
    bool some;
    Divisor divisor;

    __device__ __forceinline__ explicit Scale(uint32_t bits)
        : some(bits > 0 && bits < INFINITE), divisor(bits) {}
};

#if CODEC == INT8
__device__ __forceinline__ number_t coded(float x, const Scale& scale, uint32_t r) {
    const int code = AT_RANDOM ? code_at_random(x, scale.divisor, r) : code_of(x, scale.divisor);
    return static_cast<number_t>(scale.some ? code : 0);
}
#elif AT_RANDOM
__device__ __forceinline__ number_t coded(float x, const Scale&, uint32_t r) {
    return rounded(x, r).bits;
}
#endif

__device__ __forceinline__ void write(number_t* to, const Floats<VECTOR>& x, const Scale& scale,
                                      const Chances<VECTOR>& r) {
#if CODEC == INT8 || AT_RANDOM
    Piece made;
#pragma unroll
    for (int l = 0; l < VECTOR; ++l) made.at[l] = coded(x.at[l], scale, r.at[l]);
    *reinterpret_cast<Piece*>(to) = made;
#else
    store(to, x);
#endif
}
#else
__device__ __forceinline__ float decoded_number(number_t number, float step) {
#if CODEC == INT8
    return decoded(number, step);
#else
    return widened(number);
#endif
}
#endif

}  // namespace

#ifdef ENCODE
extern "C" __global__ void __launch_bounds__(256)
    encode_messages(const float* x, const int64_t* order, const uint32_t* tables,
                    const int64_t* ids, uint64_t seed, uint32_t step, const int64_t* peers,
                    int count, uint8_t* bytes, int64_t n) {
    const Lane own = this_lane();
    const int64_t* first_peer = peer_of(peers, count, min(own.first, n - 1));
    int64_t sources[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        sources[i] = min(own.first + i * GROUPS, n - 1);
        if (order) sources[i] = order[sources[i]];
    }
    Floats<VECTOR> pieces[ROWS][BATCH];
    const auto read = [&](int start) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int at = own.column + (start + j) * (LANES * VECTOR);
                pieces[i][j] = {};
                if (at < DIM) pieces[i][j] = load<VECTOR>(x + sources[i] * DIM + at);
            }
        }
    };
    uint32_t scales[ROWS] = {};
    if (CODEC == INT8) {
        for (int start = 0; start < HELD; start += BATCH) {
            read(start);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
#pragma unroll
                    for (int l = 0; l < VECTOR; ++l) {
                        scales[i] = max(scales[i], magnitude(pieces[i][j].at[l]));
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scales[i] = scale_bits<LANES>(scales[i]);
    }
    for (int start = 0; start < HELD; start += BATCH) {
        if (CODEC != INT8 || HELD > BATCH) read(start);
        const int64_t* peer = first_peer;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t row = own.first + i * GROUPS;
            if (row >= n) break;
            const Place<uint8_t> to = place(peer, bytes, row);
            const Scale scale(scales[i]);
            if (CODEC == INT8 && own.column == 0 && start == 0) {
                *reinterpret_cast<uint32_t*>(to.scale) = scales[i];
            }
            const uint32_t table = AT_RANDOM ? tables[sources[i]] : 0;
            const int64_t id = AT_RANDOM ? ids[sources[i]] : 0;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int at = own.column + (start + j) * (LANES * VECTOR);
                if (at >= DIM) break;
                Chances<VECTOR> r = {};
                if (AT_RANDOM) r = chances<VECTOR>(id, table, seed, step, at);
                write(reinterpret_cast<number_t*>(to.numbers) + at, pieces[i][j], scale, r);
            }
            if (to.fill && start == 0) {
                uint8_t* end = to.numbers + DIM * sizeof(number_t);
                for (end += own.column / VECTOR; end < to.fill; end += LANES) *end = 0;
            }
        }
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
    decode_messages(const uint8_t* bytes, const int64_t* peers, int count, const int64_t* order,
                    float* out, int64_t n) {
    const Lane own = this_lane();
    const int64_t* peer = peer_of(peers, count, min(own.first, n - 1));
    Place<const uint8_t> from[ROWS];
    float steps[ROWS];
    int64_t targets[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        targets[i] = min(own.first + i * GROUPS, n - 1);
        from[i] = place(peer, bytes, targets[i]);
        if (CODEC == INT8) steps[i] = *reinterpret_cast<const float*>(from[i].scale);
        if (order) targets[i] = order[targets[i]];
    }
    for (int start = 0; start < HELD; start += BATCH) {
        Piece pieces[ROWS][BATCH];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int at = own.column + (start + j) * (LANES * VECTOR);
                pieces[i][j] = {};
                if (at < DIM) {
                    const number_t* numbers = reinterpret_cast<const number_t*>(from[i].numbers);
                    pieces[i][j] = *reinterpret_cast<const Piece*>(numbers + at);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (own.first + i * GROUPS >= n) break;
            const float step = CODEC == INT8 ? step_of(steps[i]) : 0.0f;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int at = own.column + (start + j) * (LANES * VECTOR);
                if (at >= DIM) break;
                Floats<VECTOR> values;
#pragma unroll
                for (int l = 0; l < VECTOR; ++l) {
                    values.at[l] = decoded_number(pieces[i][j].at[l], step);
                }
                store(out + targets[i] * DIM + at, values);
            }
        }
    }
}
#endif
