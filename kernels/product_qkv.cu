// The products of Q, K and V with few tokens (decode), fused with all ops up to attention into one
// launch. multiply.cuh has the product and its macros.
//
//   product_qkv   biases; with HEAD_BLOCKS the norm of the heads of Q and K; RoPE of Q and K; Q to
//                 dst, K and V to the cache
//
// HEAD_BLOCKS: the number of blocks that make a head's lines. They are a cluster (sm_90 and later),
// and exchange the sums of squares of their lines.
//
// Versions (us of a token of a 4B model, Q4_K_M, as a graph; data/results/tuning/norms-1.txt):
//   heads normed in rope_store.cu   1650
//   heads normed here               1633: kept
#include "cluster.cuh"
#include "multiply.cuh"
#include "rope.cuh"

#ifdef HEAD_BLOCKS
#define CLUSTERS __cluster_dims__(HEAD_BLOCKS, 1, 1)
#else
#define CLUSTERS
#endif

#if !defined(EPILOGUE) || EPILOGUE == 1
// The end of product_qkv. Lines 2 j and 2 j + 1 of Q and K are a pair of the rotation. A thread has
// one such pair of one token.
struct Rotated {
    Segment at;
    i64 rows, n_rot, n_kv;
    int s, first, n_tokens, head_dim, pair, t;
    bool neox, rotated;
    const int* positions;
    const float* freq_factors;
    const i64* cells;
    float theta_base, freq_scale;
    double revolutions;
    struct Kept {  // of each thread, in shared memory: the product needs the registers
        float sine, cosine;
        int cell;
#ifdef HEAD_BLOCKS
        float first, second;  // factors of the norm
#endif
    }* kept;

    DEVICE const u8* weight(int) const { return at.w; }
    DEVICE i64 row(int line) const {
        const int l = int(min(i64(first + line), rows - 1)), half = int(n_rot) / 2;
        const int i = l % head_dim;
        if (s == 2 || !neox || i >= n_rot) return l;
        return l - i + i / 2 + i % 2 * half;
    }
    DEVICE void before() {
        const int i = (first + 2 * pair) % head_dim;
        rotated = s < 2 && t < n_tokens && i < n_rot;
        if (rotated)
            revolutions = rope_revolutions(i / 2, n_rot, theta_base, freq_scale, freq_factors);
#ifdef HEAD_BLOCKS
        if (s < 2 && t < n_tokens) {
            kept->first = __ldg(factors + row(2 * pair) % head_dim);
            kept->second = __ldg(factors + row(2 * pair + 1) % head_dim);
        }
#endif
    }
    DEVICE void after() {
        if (rotated) {
            const Rotation rotation(positions[t], revolutions);
            kept->sine = rotation.sine, kept->cosine = rotation.cosine;
        }
        const i64 cell = s && t < n_tokens ? cells[t] : -1;
        kept->cell = cell >= 0 && cell < n_kv ? int(cell) : -1;
    }
#ifdef HEAD_BLOCKS
    const float* factors;
    float eps;
    // 1 / sqrt(mean(x^2) + eps) over the head to which this thread's pair u, v belongs. All blocks
    // of the head call it.
    DEVICE float head_scale(float u, float v) const {
        constexpr int PAIRS = LINES / 2;
        static_assert(PAIRS <= 32 && (PAIRS & (PAIRS - 1)) == 0, "pairs of a token span warps");
        __shared__ float squares[N][HEAD_BLOCKS];
        float square = __fmaf_rn(u, u, __fmul_rn(v, v));
#pragma unroll
        for (int o = PAIRS / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
        cluster_wait();  // all blocks of the head have begun
        if (t < N) {
            for (int to = pair; to < HEAD_BLOCKS; to += PAIRS)
                store_at(address_in(&squares[t][cluster_rank()], to), square);
        }
        cluster_arrive();
        cluster_wait();
        float sum = 0;
        for (int i = 0; i < HEAD_BLOCKS; i++) sum += squares[min(t, N - 1)][i];
        return 1.f / sqrtf(sum / float(head_dim) + eps);
    }
#endif
    DEVICE void store(const LineSums& sum) const {
        const bool mine = t < n_tokens && first + 2 * pair < rows;
        const i64 a = row(2 * pair), b = row(2 * pair + 1);
        float u = 0, v = 0;
        if (mine) u = at.biased(sum(2 * pair, t), a), v = at.biased(sum(2 * pair + 1, t), b);
#ifdef HEAD_BLOCKS
        if (s < 2) {
            const float scale = head_scale(u, v);
            u = __fmul_rn(__fmul_rn(u, scale), kept->first);
            v = __fmul_rn(__fmul_rn(v, scale), kept->second);
        } else {
            cluster_wait();
        }
#endif
        if (!mine) return;
        if (rotated) {
            const Rotation rotation(kept->sine, kept->cosine);
            const float w = rotation.first(u, v);
            v = rotation.second(u, v);
            u = w;
        }
        if (s == 0) {
            float* dst = reinterpret_cast<float*>(at.dst) + t * rows;
            dst[a] = u, dst[b] = v;
        } else if (kept->cell >= 0) {
            u16* dst = reinterpret_cast<u16*>(at.dst) + kept->cell * rows;
            dst[a] = float_to_half(u), dst[b] = float_to_half(v);
        }
    }
};

// Arguments: as product_plain for Q, K and V, with caches as dst of K and V; then positions,
// freq_factors (or 0), k_indices, v_indices, n_kv, head_dim, n_rot (both even), neox, theta_base,
// freq_scale, q_factors and k_factors (head_dim) and eps of the norm (with HEAD_BLOCKS, times LINES
// head_dim). Rows are whole heads.
extern "C" __global__ void CLUSTERS LIMITS product_qkv(SEGMENT(0), SEGMENT(1), SEGMENT(2),
                                              GIVEN_ARGUMENTS,
                                              const int* positions,
                                              const float* freq_factors, const i64* k_indices,
                                              const i64* v_indices, i64 n_kv, i64 head_dim,
                                              i64 n_rot, i64 neox, float theta_base,
                                              float freq_scale, const float* q_factors,
                                              const float* k_factors, float eps_heads) {
    static_assert(LINES / 2 * N <= THREADS, "not a thread for each pair");
    pdl_trigger();
    const Segment all[3] = SEGMENTS;
    Rotated end;
    __shared__ Rotated::Kept kept[THREADS];
    end.kept = kept + threadIdx.x;
    end.s = find(all, &end.at, &end.first);
    end.rows = end.at.rows, end.n_tokens = int(n_tokens);
    end.n_rot = n_rot, end.n_kv = n_kv, end.head_dim = int(head_dim), end.neox = neox != 0;
    end.positions = positions, end.freq_factors = freq_factors;
    end.cells = end.s == 1 ? k_indices : v_indices;
    end.theta_base = theta_base, end.freq_scale = freq_scale;
#ifdef HEAD_BLOCKS
    cluster_arrive();
    end.factors = end.s == 0 ? q_factors : k_factors, end.eps = eps_heads;
#endif
    end.pair = threadIdx.x % (LINES / 2), end.t = threadIdx.x / (LINES / 2);
    multiply_segment(end.s, end, GIVEN);
}
#endif
