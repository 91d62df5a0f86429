// rope_store: all ops between the products of Q, K and V and attention, in one launch. These are
// the norm of the query and key heads (where a model has one), RoPE, and the stores into the cache.
//
// Where Q, K and V are branches on separate streams, a launch has only the heads of Q, or of K. The
// counts n_head, n_head_kv and n_heads (of all three) say which heads it has; a missing count is 0.
//
// A warp has one head of one token. The heads of Q come first, then those of K, then those of V. A
// head passes through shared memory, because the two elements of a pair lie up to head_dim / 2
// apart. Every part rounds as a separate launch does (norm.cu, rope.cu, rows.cu), so the bits are
// the same.
//
// Arguments: q_dst, k_cache, v_cache, q, k, v, q_weight, k_weight (0: no norm), positions,
// freq_factors (or 0), k_indices, v_indices, n_head, n_head_kv, n_heads, head_dim (a multiple of 8,
// at most 256), n_rot, neox, n_kv, theta_base, freq_scale, eps. Grid: (n_tokens, ceil(n_heads /
// WARPS)); WARPS warps.
//
// Versions (us of a token of llama-3-8b Q4_0 as a graph; data/results/tuning/norms-1.txt; norms of
// heads: product_qkv.cu):
//   separate launches for rotations and stores      2442 (356 launches)
//   this launch                                     not measured; many tokens use it
//   all of it in the product, product_qkv.cu        2035 (228 launches): kept for few tokens
#include "rope.cuh"

#define WARPS 4  // as in workbench/backend/cuda/kernels/elementwise.py
#define MOST_DIM 256

// x / sqrt(mean(x^2) + eps) * weight over a head, as norm_row does it. A lane has a float4.
DEVICE void norm_head(float4* head, const float4* weight, int dim, float eps) {
    const int lane = threadIdx.x % 32, n = dim / 4;
    float total = 0;
    for (int base = 0; base < n; base += 32) {
        float sum = 0;
        if (base + lane < n) {
            const float4 v = head[base + lane];
            sum = __fmaf_rn(v.x, v.x, sum);
            sum = __fmaf_rn(v.y, v.y, sum);
            sum = __fmaf_rn(v.z, v.z, sum);
            sum = __fmaf_rn(v.w, v.w, sum);
        }
        total += warp_sum(sum);
    }
    const float scale = 1.f / sqrtf(total / float(dim) + eps);
    for (int i = lane; i < n; i += 32) {
        const float4 v = head[i], w = __ldg(weight + i);
        head[i] = make_float4(
            __fmul_rn(__fmul_rn(v.x, scale), w.x), __fmul_rn(__fmul_rn(v.y, scale), w.y),
            __fmul_rn(__fmul_rn(v.z, scale), w.z), __fmul_rn(__fmul_rn(v.w, scale), w.w));
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    rope_store(float* q_dst, u16* k_cache, u16* v_cache, const float* q, const float* k,
               const float* v, const float* q_weight, const float* k_weight, const int* positions,
               const float* freq_factors, const i64* k_indices, const i64* v_indices, i64 n_head,
               i64 n_head_kv, i64 n_heads, i64 head_dim, i64 n_rot, i64 neox, i64 n_kv,
               float theta_base, float freq_scale, float eps) {
    pdl_trigger();
    __shared__ __align__(16) float heads[WARPS][MOST_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = int(head_dim);
    const int pairs = int(n_rot) / 2;
    const i64 token = blockIdx.x;
    i64 head = i64(blockIdx.y) * WARPS + warp;
    double revolutions[MOST_DIM / 64];  // of this lane's pairs
#pragma unroll
    for (int j = 0; j < MOST_DIM / 64; j++) {
        const int i = lane + 32 * j;
        if (i < pairs)
            revolutions[j] = rope_revolutions(i, n_rot, theta_base, freq_scale, freq_factors);
    }
    pdl_wait();
    if (head >= n_heads) return;

    const bool is_q = head < n_head, is_k = !is_q && head < n_head + n_head_kv;
    const float *from = q, *weight = q_weight;
    u16* to = nullptr;
    i64 there = 0;
    i64 many = n_head;
    if (!is_q) {
        head -= is_k ? n_head : n_head + n_head_kv;
        many = n_head_kv;
        from = is_k ? k : v;
        weight = is_k ? k_weight : nullptr;
        there = is_k ? k_indices[token] : v_indices[token];
        if (there < 0 || there >= n_kv) return;
        to = (is_k ? k_cache : v_cache) + (there * many + head) * dim;
    }
    from += (token * many + head) * dim;
    if (!is_q && !is_k) {
        for (int i = lane; i < dim; i += 32) to[i] = float_to_half(from[i]);
        return;
    }
    float* own = heads[warp];
    for (int i = lane; i < dim / 4; i += 32)
        reinterpret_cast<float4*>(own)[i] = reinterpret_cast<const float4*>(from)[i];
    if (weight)
        norm_head(reinterpret_cast<float4*>(own), reinterpret_cast<const float4*>(weight), dim,
                  eps);
    __syncwarp();
    float* dst = q_dst + (token * n_head + head) * dim;
#pragma unroll
    for (int j = 0; j < MOST_DIM / 64; j++) {
        const int i = lane + 32 * j;
        if (i >= pairs) break;
        const Rotation rotation(positions[token], revolutions[j]);
        const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;
        const float first = rotation.first(own[a], own[b]);
        const float second = rotation.second(own[a], own[b]);
        if (is_q) {
            dst[a] = first, dst[b] = second;
        } else {
            to[a] = float_to_half(first), to[b] = float_to_half(second);
        }
    }
    for (int i = int(n_rot) + lane; i < dim; i += 32) {
        if (is_q)
            dst[i] = own[i];
        else
            to[i] = float_to_half(own[i]);
    }
}
