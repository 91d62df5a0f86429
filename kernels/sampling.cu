// Tokens that the device draws itself, and uses as its next inputs.
//
//   feed         the ids of a step: known ids, and for id -1 - s the last token of sequence s
//   draw         draws a token from each row of logits: top-k, top-p, min-p, temperature, and a
//                uniform number
//   keep_tokens  stores drawn tokens as the last tokens of their sequences
//
// draw has a block for each row. Elements have a total order: the larger logit first, and of equal
// logits the lower id. A 64-bit word, `rank`, stands for the place in this order. top-k, top-p and
// the draw each look for the rank at which a count, or a sum of weights, reaches a target:
//
//   1  a histogram over 2,048 equal intervals of the logits finds the interval of that rank
//   2  the elements of the interval are gathered in shared memory and sorted. Where they are too
//      many, step 1 divides the interval again
//
// Where top-k keeps few elements, they are gathered at once and sorted, and the rest is done on the
// sorted list. min-p cuts by value, so it needs no sum.
//
// Weights are exp(logit - maximum) in fixed point, 2^-40. Integers add up to the same sum in any
// order, so the atomics here are deterministic. The exponential has the same steps as
// model/draw_weights.py, and each product and sum is rounded by itself. So model/sampler.py draws
// the same token.
//
// Versions: 1, this one. Radix digits of the float's bits, in place of equal intervals, would put
// nearly all logits into some twenty counters, for which threads then queue.
#include "common.cuh"

typedef unsigned long long u64;

constexpr int THREADS = 1024, BUCKETS = 2048, LIST = 2048;
constexpr int SETTINGS = 5;  // of a row: temperature, top_k, top_p, log(min_p), uniform

// feed: dst, ids, last, n_tokens, n_seqs. keep_tokens: last, ids, rows, n_ids, n_seqs. Grid: one
// block of 256 threads for each 256.
extern "C" __global__ void feed(int* dst, const int* ids, const int* last, i64 n_tokens,
                                i64 n_seqs) {
    pdl_trigger();
    pdl_wait();
    const i64 t = i64(blockIdx.x) * 256 + threadIdx.x;
    if (t >= n_tokens) return;
    const int id = ids[t];
    dst[t] = id >= 0 ? id : -1 - id < n_seqs ? last[-1 - id] : 0;
}

extern "C" __global__ void keep_tokens(int* last, const int2* ids, const int* rows, i64 n_ids,
                                       i64 n_seqs) {
    pdl_trigger();
    pdl_wait();
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= n_ids) return;
    const int row = rows[i];
    if (row >= 0 && row < n_seqs) last[row] = ids[i].x;
}

// ranks ------------------------------------------------------------------------------------------

// The rank of an element: it grows from the largest logit to the smallest, and among equal logits
// with the id.
DEVICE u64 rank_of(float x, int id) {
    const u32 bits = __float_as_uint(x + 0.f);  // -0 is 0
    const u32 rising = bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(~rising) << 32 | u32(id);
}
DEVICE float logit_of(u64 rank) {
    const u32 rising = ~u32(rank >> 32);
    return __uint_as_float(rising >> 31 ? rising & 0x7fffffffu : ~rising);
}

constexpr u64 LAST = ~0ull;

template <class T>
DEVICE T warp_scan(T v) {  // inclusive
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const T other = __shfl_up_sync(~0u, v, o);
        if (int(threadIdx.x % 32) >= o) v += other;
    }
    return v;
}

struct Shared {
    u64 mass[BUCKETS];
    u32 count[BUCKETS];
    u64 list[LIST];
    u64 of_warps[32];
    float lows[32];
    u64 bests[32];
    u32 n;              // elements of the list
    int bucket;         // the bucket in which the sum reaches the target
    u64 before;         // the sum before that bucket
    u64 answer;
};

// The sum of `own` over the threads before this thread. total: the sum over the block.
DEVICE u64 block_before(Shared& s, u64 own, u64& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 sum = warp_scan(own);
    __syncthreads();
    if (lane == 31) s.of_warps[warp] = sum;
    __syncthreads();
    const u64 all = warp_scan(s.of_warps[lane]);
    total = __shfl_sync(~0u, all, 31);
    const u64 front = warp == 0 ? 0 : __shfl_sync(~0u, all, warp - 1);
    return front + sum - own;
}

// A row of logits. Only elements with ranks up to `end` still count. most: the largest logit.
struct Row {
    const float* logits;
    int n;
    float most;
    u64 end;

    template <class Act>
    DEVICE void each(Act act) const {
        if (n % 4 == 0) {
            const float4* fours = reinterpret_cast<const float4*>(logits);
            for (int i = threadIdx.x; i < n / 4; i += THREADS) {
                const float4 v = fours[i];
                act(v.x, 4 * i), act(v.y, 4 * i + 1), act(v.z, 4 * i + 2), act(v.w, 4 * i + 3);
            }
        } else {
            for (int i = threadIdx.x; i < n; i += THREADS) act(logits[i], i);
        }
    }
};

// exp(x) * 2^40, rounded down, for x up to 0; see model/draw_weights.py.
DEVICE u64 weight_of(float x) {
    const auto times = [](float a, float b) { return __fmul_rn(a, b); };
    const auto plus = [](float a, float b) { return __fadd_rn(a, b); };
    const float z = fmaxf(x, -29.f), whole = 12582912.f;
    const float n = plus(plus(times(z, 1.44269504088896341f), whole), -whole);
    const float r = plus(plus(z, -times(n, 0.693359375f)), -times(n, -2.12194440e-4f));
    float y = 1.9875691500e-4f;
    y = plus(times(y, r), 1.3981999507e-3f);
    y = plus(times(y, r), 8.3334519073e-3f);
    y = plus(times(y, r), 4.1665795894e-2f);
    y = plus(times(y, r), 1.6666665459e-1f);
    y = plus(times(y, r), 5.0000001201e-1f);
    y = plus(plus(times(y, times(r, r)), r), 1.f);
    return u64(y * __uint_as_float(u32(127 + 40 + int(n)) << 23));  // times 2^(40 + n): exact
}

// The amount that an element adds to a sum: 1, or its weight at a temperature.
struct Weight {
    float inverse;  // 1 / temperature
    bool counts;    // every element adds 1
    DEVICE u64 of(float x, float most) const {
        return counts ? 1 : weight_of(__fmul_rn(__fadd_rn(x, -most), inverse));
    }
};

// Sorts the first n elements of the list; n is a power of two, at most LIST.
DEVICE void sort(Shared& s, int n) {
    for (int size = 2; size <= n; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += THREADS) {
                const int other = i ^ step;
                if (other > i) {
                    const u64 a = s.list[i], b = s.list[other];
                    if ((a > b) == ((i & size) == 0)) s.list[i] = b, s.list[other] = a;
                }
            }
        }
    }
    __syncthreads();
}

// Gathers and sorts the elements for which `inside` holds, at most LIST. Returns how many.
template <class Inside>
DEVICE int gather(Shared& s, const Row& row, Inside inside) {
    __syncthreads();
    if (threadIdx.x == 0) s.n = 0;
    __syncthreads();
    row.each([&](float x, int id) {
        const u64 rank = rank_of(x, id);
        if (rank <= row.end && inside(x)) {
            const u32 at = atomicAdd(&s.n, 1u);
            if (at < LIST) s.list[at] = rank;
        }
    });
    __syncthreads();
    const int n = min(int(s.n), LIST);
    int size = 2;
    while (size < n) size *= 2;
    for (int i = n + threadIdx.x; i < size; i += THREADS) s.list[i] = LAST;
    sort(s, size);
    return n;
}

// The rank at which the sum over the sorted list reaches the target, which is above `before`. The
// sum begins with `before`. The last rank where it does not reach the target.
DEVICE u64 reached(Shared& s, const Row& row, int n, Weight weight, u64 before, u64 target) {
    if (threadIdx.x == 0) s.answer = n ? s.list[n - 1] : row.end;
    __syncthreads();
    constexpr int EACH = LIST / THREADS;
    u64 own[EACH], sum = 0, total;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = EACH * threadIdx.x + j;
        own[j] = i < n ? weight.of(logit_of(s.list[i]), row.most) : 0;
        sum += own[j];
    }
    u64 front = before + block_before(s, sum, total);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        if (front < target && front + own[j] >= target) s.answer = s.list[EACH * threadIdx.x + j];
        front += own[j];
    }
    __syncthreads();
    return s.answer;
}

// The rank at which the sum over the row, in order, reaches the target. low: the least finite
// logit.
DEVICE u64 place(Shared& s, const Row& row, float low, Weight weight, u64 target) {
    float top = row.most, bottom = low;
    u64 before = 0;  // the sum of all elements above `top`
    bool first = true;
    for (;;) {
        // The last bucket has only -infinity, so the other buckets span the finite logits.
        const float span = top - bottom, scale = float(BUCKETS - 1) / span;
        const bool is_wide = !(span > 1e-30f && span < 1e38f);  // float32 cannot divide such a span
        const double wide_scale = top > bottom ? (BUCKETS - 1) / (double(top) - bottom) : 0.;
        const auto bucket = [&](float x) {
            if (x == -INFINITY_F) return BUCKETS - 1;
            const int at = is_wide ? int((double(top) - x) * wide_scale) : int((top - x) * scale);
            return min(max(at, 0), BUCKETS - 2);
        };
        const auto here = [&](float x) { return first || (x <= top && x >= bottom); };
        __syncthreads();
        for (int i = threadIdx.x; i < BUCKETS; i += THREADS) s.mass[i] = s.count[i] = 0;
        if (threadIdx.x == 0) s.bucket = BUCKETS - 1, s.before = 0;
        __syncthreads();
        row.each([&](float x, int id) {
            if (rank_of(x, id) <= row.end && here(x)) {
                const int b = bucket(x);
                atomicAdd(&s.count[b], 1u);
                if (!weight.counts) atomicAdd(&s.mass[b], weight.of(x, row.most));
            }
        });
        __syncthreads();
        constexpr int EACH = BUCKETS / THREADS;
        u64 own[EACH], sum = 0, total;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int b = EACH * threadIdx.x + j;
            own[j] = weight.counts ? s.count[b] : s.mass[b];
            sum += own[j];
        }
        u64 front = before + block_before(s, sum, total);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (front < target && front + own[j] >= target)
                s.bucket = EACH * threadIdx.x + j, s.before = front;
            front += own[j];
        }
        __syncthreads();
        if (before + total < target) return row.end;  // all elements count
        const int found = s.bucket;
        const u64 sum_before = s.before;
        const u32 many = s.count[found];
        float high = -INFINITY_F, least = INFINITY_F;
        if (many > LIST) {  // find the largest and the least logit of the interval
            row.each([&](float x, int id) {
                if (rank_of(x, id) <= row.end && here(x) && bucket(x) == found)
                    high = fmaxf(high, x), least = fminf(least, x);
            });
            high = warp_max(high), least = -warp_max(-least);
            __syncthreads();
            if (threadIdx.x % 32 == 0)
                s.lows[threadIdx.x / 32] = least,
                s.of_warps[threadIdx.x / 32] = __float_as_uint(high);
            __syncthreads();
            least = -warp_max(-s.lows[threadIdx.x % 32]);
            high = warp_max(__uint_as_float(u32(s.of_warps[threadIdx.x % 32])));
        }
        if (many <= LIST) {
            const int n = gather(s, row, [&](float x) { return here(x) && bucket(x) == found; });
            return reached(s, row, n, weight, sum_before, target);
        }
        if (high == least) {  // all are equal: the id decides
            const u64 each = weight.of(high, row.most);
            // the number of the wanted element, in order of ids
            const u64 wanted = each ? (target - sum_before + each - 1) / each : 1;
            const int chunk = (row.n + THREADS - 1) / THREADS;
            u64 mine = 0, all;
            for (int i = chunk * threadIdx.x; i < min(chunk * int(threadIdx.x + 1), row.n); i++)
                mine += row.logits[i] == high && rank_of(high, i) <= row.end;
            u64 passed = block_before(s, mine, all);
            for (int i = chunk * threadIdx.x; i < min(chunk * int(threadIdx.x + 1), row.n); i++) {
                if (row.logits[i] == high && rank_of(high, i) <= row.end && ++passed == wanted)
                    s.answer = rank_of(high, i);
            }
            __syncthreads();
            return s.answer;
        }
        top = high, bottom = least, before = sum_before, first = false;
    }
}

// The sum of the weights of all elements that count.
DEVICE u64 sum_of(Shared& s, const Row& row, Weight weight) {
    u64 own = 0, total;
    row.each([&](float x, int id) {
        if (rank_of(x, id) <= row.end) own += weight.of(x, row.most);
    });
    block_before(s, own, total);
    return total;
}

// The sum of the weights of the first n elements of the list.
DEVICE u64 sum_of_list(Shared& s, const Row& row, int n, Weight weight) {
    u64 own = 0, total;
    for (int i = threadIdx.x; i < n; i += THREADS)
        own += weight.of(logit_of(s.list[i]), row.most);
    block_before(s, own, total);
    return total;
}

DEVICE u64 share_of(u64 total, double part) { return u64(double(total) * part); }

// Arguments: dst, logits, settings (n_rows, SETTINGS), n_rows, n_vocab. Grid: n_rows; THREADS
// threads; shared memory: a Shared.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw(int2* dst, const float* logits, const float* settings, i64 n_rows, i64 n_vocab) {
    pdl_trigger();
    pdl_wait();
    const i64 begun = now_ns();
    const auto answer = [&](int token) {
        if (threadIdx.x == 0) dst[blockIdx.x] = make_int2(token, int(now_ns() - begun));
    };
    extern __shared__ __align__(16) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const float* how = settings + SETTINGS * blockIdx.x;
    const float temperature = how[0], top_p = how[2], log_min_p = how[3], uniform = how[4];
    const u64 top_k = u64(how[1]);
    Row row = {logits + i64(blockIdx.x) * n_vocab, int(n_vocab), 0.f, LAST};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    u64 best = LAST;
    float low = INFINITY_F;
    bool bad = false;
    row.each([&](float x, int id) {
        bad |= x != x;
        best = min(best, rank_of(x, id));
        low = fminf(low, x == -INFINITY_F ? INFINITY_F : x);
    });
#pragma unroll
    for (int o = 16; o; o /= 2) best = min(best, __shfl_xor_sync(~0u, best, o));
    low = -warp_max(-low);
    if (lane == 0) s.bests[warp] = best, s.lows[warp] = low;
    bad = __syncthreads_or(bad);
    best = s.bests[lane];
#pragma unroll
    for (int o = 16; o; o /= 2) best = min(best, __shfl_xor_sync(~0u, best, o));
    low = -warp_max(-s.lows[lane]);
    row.most = logit_of(best);
    if (bad || row.most == INFINITY_F || row.most == -INFINITY_F) {
        answer(-1);
        return;
    }
    if (temperature == 0) {
        answer(int(u32(best)));
        return;
    }
    const Weight one = {0.f, true}, plain = {1.f, false};
    const Weight warm = {fminf(1.f / temperature, 1e30f), false};
    // the last rank that min-p keeps
    const u64 likely = rank_of(__fadd_rn(row.most, log_min_p), ~0);
    u64 token;
    if (top_k > 0 && top_k < u64(n_vocab)) row.end = place(s, row, low, one, top_k);
    if (top_k > 0 && top_k <= LIST) {  // the survivors, sorted
        int n = gather(s, row, [](float) { return true; });
        u64 end = likely;
        if (top_p < 1) {
            const u64 total = sum_of_list(s, row, n, plain);
            end = min(end, reached(s, row, n, plain, 0, max(share_of(total, top_p), u64(1))));
        }
        u64 own = 0, kept;
        for (int i = threadIdx.x; i < n; i += THREADS) own += s.list[i] <= end;
        block_before(s, own, kept);
        n = int(kept);
        const u64 total = sum_of_list(s, row, n, warm);
        token = reached(s, row, n, warm, 0, min(share_of(total, uniform) + 1, total));
    } else {
        if (top_p < 1) {
            const u64 total = sum_of(s, row, plain);
            row.end = place(s, row, low, plain, max(share_of(total, top_p), u64(1)));
        }
        row.end = min(row.end, likely);
        const u64 total = sum_of(s, row, warm);
        token = place(s, row, low, warm, min(share_of(total, uniform) + 1, total));
    }
    answer(int(u32(token)));
}
