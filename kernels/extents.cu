// The cells of the cache that each token sees, so that attention need not read the other cells
// (workbench/engine/cache/extent.py has the rules, and the same on the host).
//
//   kv_extents   the end of the last 256 cells of which a token sees any; a block for each token,
//                which reads the mask from its end
//   kv_classes   for each 64 cells whether a token sees none (0), some (1) or all (2) of them; a
//                warp for each class
//
// Versions: 1, this one. llama.cpp's kernel reads the mask in steps of 256 cells with a barrier
// each, before attention of every layer. This kernel takes 2,048 cells a step, once for all layers.
#include "common.cuh"

constexpr u32 HIDDEN = 0xfc00;  // -inf as a half
constexpr int EXTENT = 256, CLASS = 64, WARPS = 8;

// The last cell of first .. first + 7 that the token sees, or -1.
DEVICE int last_seen(const u16* row, i64 first, i64 n_kv) {
    int last = -1;
    if (first >= n_kv) return last;
    if (n_kv % 8 == 0) {
        const uint4 v = *reinterpret_cast<const uint4*>(row + first);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if ((words[i / 2] >> 16 * (i % 2) & 0xffff) != HIDDEN) last = int(first) + i;
        }
    } else {
        for (int i = 0; i < 8; i++) {
            if (first + i < n_kv && row[first + i] != HIDDEN) last = int(first) + i;
        }
    }
    return last;
}

// Arguments: dst, mask, n_tokens, n_kv. Grid: n_tokens; WARPS * 32 threads.
extern "C" __global__ void kv_extents(int* dst, const u16* mask, i64 n_tokens, i64 n_kv) {
    pdl_trigger();
    pdl_wait();
    __shared__ int found[WARPS];
    const u16* row = mask + blockIdx.x * n_kv;
    constexpr int STEP = 8 * 32 * WARPS;
    int end = 0;
    for (i64 step = (n_kv + STEP - 1) / STEP - 1; step >= 0 && end == 0; step--) {
        const int last = last_seen(row, step * STEP + 8 * threadIdx.x, n_kv);
        const int most = __reduce_max_sync(~0u, last);
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = most;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; w++) end = max(end, found[w] + 1);
        __syncthreads();
    }
    if (threadIdx.x == 0) dst[blockIdx.x] = int(min(i64(end + EXTENT - 1) / EXTENT * EXTENT, n_kv));
}

// Arguments: dst, mask, n_tokens, n_kv. Grid: (n_tokens, ceil(classes / WARPS)).
extern "C" __global__ void kv_classes(u8* dst, const u16* mask, i64 n_tokens, i64 n_kv) {
    pdl_trigger();
    pdl_wait();
    const i64 n = (n_kv + CLASS - 1) / CLASS;
    const i64 at = i64(blockIdx.y) * WARPS + threadIdx.x / 32;
    if (at >= n) return;
    const u16* row = mask + blockIdx.x * n_kv;
    int seen = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 cell = at * CLASS + half * 32 + threadIdx.x % 32;
        seen += __popc(__ballot_sync(~0u, cell < n_kv && row[cell] != HIDDEN));
    }
    const int own = int(min(n_kv - at * CLASS, i64(CLASS)));
    if (threadIdx.x % 32 == 0) dst[blockIdx.x * n + at] = u8(seen == 0 ? 0 : seen == own ? 2 : 1);
}
