// 64 bits of a key, see cupyrec/ops/hash_table.py.
#pragma once
#include "common.cuh"

// The finalizer of MurmurHash3 over the id, with the table added after its first round.
__device__ __forceinline__ uint64_t hash_key(uint32_t table, int64_t id) {
    uint64_t h = static_cast<uint64_t>(id);
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCDull;
    h += (static_cast<uint64_t>(table) + 1) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53ull;
    return h ^ (h >> 33);
}
