// What: x[i, d] of word w = philox4x32(id[i], table[i], d / 4)[d % 4] and the distribution of
//   table[i] and d: a + b * ((w >> 8) / 2^24) where it is uniform (mass 0), else a + b * z,
//   clamped, with z the standard normal quantile of low + mass * (w + 1/2) / 2^32.
// Who does what: a thread draws and writes 4 columns of a vector, of the last ones as many as
//   there are; consecutive threads have consecutive columns.
// Assumes: VECTOR divides DIM; x is aligned to VECTOR floats; stops increase.
// Moves: 12 N bytes read, 4 N DIM written; the few distributions come from L1.
// Tried: a thread for VECTOR columns: where 4 doesn't divide DIM, a warp then touches each sector
//   of x once, but Philox runs more often, and what is drawn bounds the kernel (instructions of a
//   warp for 4 columns a thread: 246 uniform, 867 normal). normal_quantile inlined four times: 12
//   bytes spill; once, in a loop over the columns: uniform vectors take 300 instructions.
#include "ieee.cuh"
#include "philox.cuh"

namespace {

// Operations here are rounded one by one, as the CPU does.
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return __dadd_rn(__dmul_rn(a, b), c);
}

// sum * r^n + ...: Horner's rule.
template <typename... Rest>
__device__ __forceinline__ double polynomial(double r, double sum, Rest... rest) {
    ((sum = multiply_add(sum, r, rest)), ...);
    return sum;
}

__device__ __forceinline__ double log_of(double x) {  // x >= 2^-1022
    const int64_t bits = __double_as_longlong(x);
    const int64_t exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;  // those of sqrt(1/2)
    const double m = __longlong_as_double(bits - exponent * (1LL << 52));
    const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
    const double series = polynomial(__dmul_rn(s, s), 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0);
    return multiply_add(static_cast<double>(exponent), 0.6931471805599453,
                        __dmul_rn(__dmul_rn(2.0, s), series));
}

// Wichura 1988, AS 241: the same bits as cupyrec/ops/initial_vectors.py.
__device__ __noinline__ double normal_quantile(double p) {
    const double q = __dsub_rn(p, 0.5);
    double above, below;
    if (fabs(q) <= 0.425) {
        const double r = __dsub_rn(0.180625, __dmul_rn(q, q));
        above = polynomial(r, 2509.0809287301227, 33430.57558358813, 67265.7709270087,
                           45921.95393154987, 13731.69376550946, 1971.5909503065513,
                           133.14166789178438, 3.3871328727963665);
        below = polynomial(r, 5226.495278852854, 28729.085735721943, 39307.89580009271,
                           21213.794301586597, 5394.196021424751, 687.1870074920579,
                           42.31333070160091, 1.0);
        return __dmul_rn(q, __ddiv_rn(above, below));
    }
    double r = __dsqrt_rn(-log_of(q < 0 ? p : __dsub_rn(1.0, p)));
    if (r <= 5) {
        r = __dsub_rn(r, 1.6);
        above = polynomial(r, 0.0007745450142783414, 0.022723844989269184, 0.2417807251774506,
                           1.2704582524523684, 3.6478483247632045, 5.769497221460691,
                           4.630337846156546, 1.4234371107496835);
        below = polynomial(r, 1.0507500716444169e-09, 0.0005475938084995345, 0.015198666563616457,
                           0.14810397642748008, 0.6897673349851, 1.6763848301838038,
                           2.053191626637759, 1.0);
    } else {
        r = __dsub_rn(r, 5.0);
        above = polynomial(r, 2.0103343992922881e-07, 2.7115555687434876e-05, 0.0012426609473880784,
                           0.026532189526576124, 0.29656057182850487, 1.7848265399172913,
                           5.463784911164114, 6.657904643501103);
        below = polynomial(r, 2.0442631033899397e-15, 1.421511758316446e-07, 1.8463183175100548e-05,
                           0.0007868691311456133, 0.014875361290850615, 0.1369298809227358,
                           0.599832206555888, 1.0);
    }
    const double x = __ddiv_rn(above, below);
    return q < 0 ? -x : x;
}

struct alignas(16) Distribution {
    double low, mass, a, b, least, most;

    __device__ __forceinline__ float draw(uint32_t word) const {
        if (mass == 0) {
            const float u = __fmul_rn(__uint2float_rn(word >> 8), 0x1p-24f);  // exact
            return ieee_add(ieee_float(a), ieee_mul(ieee_float(b), u));
        }
        const double u = __dmul_rn(__dadd_rn(__uint2double_rn(word), 0.5), 0x1p-32);  // exact
        const double x = multiply_add(b, normal_quantile(multiply_add(mass, u, low)), a);
        return ieee_float(x < least ? least : x > most ? most : x);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    initial_vectors(const uint32_t* tables, const int64_t* ids, uint64_t seed, const int32_t* first,
                    uint32_t last, const int32_t* stops, const Distribution* parameters, float* x,
                    int64_t n) {
    constexpr int QUADS = (DIM + 3) / 4;
    const int64_t i = thread_number() / QUADS;
    if (i >= n) return;
    const int start = static_cast<int>(thread_number() % QUADS) * 4;
    const uint64_t id = static_cast<uint64_t>(ids[i]);
    const uint32_t table = tables[i];
    const Words words = philox4x32(static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32),
                                   table, start / 4, seed);
    int range = first[min(table, last)], stop = stops[range];
    while (stop <= start) stop = stops[++range];
    Distribution from = parameters[range];
#pragma unroll
    for (int m = 0; m < 4; m += VECTOR) {
        Floats<VECTOR> piece;
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) {
            const int column = start + m + l;
            if (column == stop && column < DIM) {
                stop = stops[++range];
                from = parameters[range];
            }
            piece.at[l] = from.draw(words.at[m + l]);
        }
        if (start + m < DIM) store(x + i * DIM + start + m, piece);
    }
}
