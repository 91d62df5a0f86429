// Merges partial results of attention, and stores the result. The partial results come from the
// warps of a block, from the blocks of a cluster, or from clusters.
//
// Versions (times: attention.cu): 1, the last of up to 33 blocks merges all rows: slower; 2, this
// version.
#pragma once
#include "attention.cuh"
#include "cluster.cuh"
#include "quantise.cuh"

// The partial result of four columns of a row, over some of the cells: the weighted sum of values
// and the sum of weights, both relative to 2^most.
struct Partial {
    float4 sum;
    float most, weight;
};

DEVICE float4 scaled(float4 v, float f) {
    return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

DEVICE float4 add_scaled(float4 sum, float4 v, float f) {
    return make_float4(fmaf(v.x, f, sum.x), fmaf(v.y, f, sum.y), fmaf(v.z, f, sum.z),
                       fmaf(v.w, f, sum.w));
}

// Merges the partials load(0) .. load(n - 1), in order. BATCH loads are in flight at once.
template <int BATCH, class Load>
DEVICE Partial merged(int n, Load load) {
    const Partial nothing = {make_float4(0, 0, 0, 0), NEG_INFINITY, 0};
    Partial all = nothing;
    for (int first = 0; first < n; first += BATCH) {
        Partial own[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) own[i] = first + i < n ? load(first + i) : nothing;
        float most = all.most;
#pragma unroll
        for (int i = 0; i < BATCH; i++) most = fmaxf(most, own[i].most);
        const float keep = rescale(all.most, most);
        all = {scaled(all.sum, keep), most, all.weight * keep};
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float f = rescale(own[i].most, most);
            all.weight = fmaf(own[i].weight, f, all.weight);
            all.sum = add_scaled(all.sum, own[i].sum, f);
        }
    }
    return all;
}

// items and results -------------------------------------------------------------------------------

constexpr int QUADS = HEAD_DIM / 4;

// An item is four columns of one row, a lane's work. Lanes past the last item repeat it.
struct Item {
    bool there;
    int row, quad;
    DEVICE Item(int first, int items) {
        const int i = first + int(threadIdx.x % 32);
        there = i < items;
        row = min(i, items - 1) / QUADS, quad = min(i, items - 1) % QUADS;
    }
};

// The results of attention: floats, or rows of Q8_ACT with all heads of a token.
struct Output {
    u8* dst;
    const float* sinks;
    i64 n_head;
    bool quantised;
    // Stores an item. Whole warps call it; 8 lanes have a block of 32.
    DEVICE void store(const Share& share, const Item& item, const Partial& all) const {
        float weight = all.weight, keep = 1;
        if (SINKS) add_sink(sinks, share.head_of(item.row), all.most, weight, keep);
        const bool none = weight == 0;
        const float f = none ? 0.f : __fdiv_rn(keep, weight);
        const float4 v = none ? make_float4(0, 0, 0, 0) : scaled(all.sum, f);
        const i64 token = share.token_of(item.row), cols = n_head * HEAD_DIM;
        const i64 c = share.head_of(item.row) * HEAD_DIM + 4 * item.quad;
        if (quantised) {
            quantise4(dst + token * act_row_bytes(cols), cols, c, v, item.there);
        } else if (item.there) {
            *reinterpret_cast<float4*>(reinterpret_cast<float*>(dst) + token * cols + c) = v;
        }
    }
    // Zeroes the padding of rows of Q8_ACT, for the tokens whose first head this block has.
    DEVICE void pad(const Share& share) const {
        if (!quantised || share.head_kv) return;
        const i64 cols = n_head * HEAD_DIM;
        for (int i = 0; i < share.count; i++) {
            if (share.row(i) % share.group == 0)
                zero_padding(dst + share.token_of(i) * act_row_bytes(cols), cols, threadIdx.x);
        }
    }
};
