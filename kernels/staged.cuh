// Quantised weights on their way through shared memory, as they lie in the file's planes.
//
// A *stage* is STEPS steps of 4 units of each of ROWS rows. Every plane of a type has a part of the
// stage, CHUNKS words of 16 bytes for each row: the aligned words that hold the bytes of its units,
// which may begin anywhere in the first of them. Copies are 16 bytes whatever a plane's fields are;
// a word with a byte of the tensor in it can be read whole, as tensors begin on multiples of 16.
//
// Wants ROWS, STEPS and THREADS.
#pragma once
#include "halves.cuh"

constexpr int UNITS = 4 * STEPS;  // of a row, in a stage

// copies -----------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes into shared memory, zeros unless `there`.
DEVICE void copy_async(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
DEVICE void prefetch(const void* from) {  // into L2; no value is read
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// planes -----------------------------------------------------------------------------------------

// For each type, the planes in order: plane p has bytes[p] for every per[p] units. `read` puts a
// unit together; at(plane) is where the plane has it.
template <class W>
struct Planes;

template <class T>
DEVICE T take(const u8* p) {
    return *reinterpret_cast<const T*>(p);
}

template <>
struct Planes<Q4_0> {
    static constexpr int count = 2, bytes[] = {16, 2}, per[] = {1, 1};
    template <class At>
    static DEVICE Q4_0::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<u16>(at.template word<1>())};
    }
};
template <>
struct Planes<Q8_0> {
    static constexpr int count = 2, bytes[] = {32, 2}, per[] = {1, 1};
    template <class At>
    static DEVICE Q8_0::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint4>(at.template word<0, 1>()),
                take<u16>(at.template word<1>())};
    }
};
template <>
struct Planes<MXFP4> {
    static constexpr int count = 2, bytes[] = {16, 1}, per[] = {1, 1};
    template <class At>
    static DEVICE MXFP4::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<u8>(at.template word<1>())};
    }
};
template <>
struct Planes<Q4_K> {
    static constexpr int count = 2, bytes[] = {16, 16}, per[] = {1, 8};
    template <class At>
    static DEVICE Q4_K::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint4>(at.template word<1>())};
    }
};
template <>
struct Planes<Q5_K> {
    static constexpr int count = 3, bytes[] = {16, 4, 16}, per[] = {1, 1, 8};
    template <class At>
    static DEVICE Q5_K::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint4>(at.template word<2>()),
                take<u32>(at.template word<1>())};
    }
};
template <>
struct Planes<Q6_K> {
    static constexpr int count = 4, bytes[] = {16, 8, 2, 2}, per[] = {1, 1, 1, 8};
    template <class At>
    static DEVICE Q6_K::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint2>(at.template word<1>()),
                take<u16>(at.template word<2>()), take<u16>(at.template word<3>())};
    }
};

// Plane P of type W: where units lie in the tensor, and its part of a stage.
template <class W, int P>
struct Plane {
    static constexpr int BYTES = Planes<W>::bytes[P], PER = Planes<W>::per[P];
    // the first unit of a stage's row is a multiple of GRAIN, its bytes of ALIGN
    static constexpr int GRAIN = W::block == 256 ? (UNITS < 8 ? UNITS : 8) : 1;
    static constexpr int PITCH = PER > 1 ? BYTES : BYTES * GRAIN;
    static constexpr int ALIGN = PITCH % 16 == 0 ? 16 : PITCH & -PITCH;
    static constexpr int LENGTH = BYTES * (UNITS > PER ? UNITS / PER : 1);
    static constexpr int CHUNKS = (LENGTH + 31 - ALIGN) / 16;
    static constexpr int SIZE = ROWS * CHUNKS * 16;

    static DEVICE i64 at(u32 unit) { return i64(unit / PER) * BYTES; }

    // So that the 8 lanes of a phase, 2 rows of 4 units, read 8 different bank groups.
    static DEVICE u32 chunk(u32 row, u32 c) {
        if constexpr (BYTES == 32) return c ^ (row & 1);
        if constexpr (BYTES == 16 && PER == 1 && CHUNKS > 4) return c ^ (row & 1) * 4;
        return c;
    }

    // Asks for the part of a stage that begins at unit u0 of rows row0 and following. Rows past the
    // end get zeros, and so do whole words past the end of a row: nothing is read for them, and
    // their addresses may be any. EARLY: into L2 alone, which may be before pdl_wait.
    template <bool EARLY>
    static DEVICE void request(u32 to, const u8* plane, u32 units, u32 row0, u32 rows, u32 u0) {
        const u32 last = min(u0 + UNITS, units) - 1;
        if constexpr (ALIGN == 16 && THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0) {
            constexpr u32 PASS = THREADS / CHUNKS;  // all words of a thread have one place in rows
            const u32 r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
            const bool inside = at(u0) + c * 16 < at(last) + BYTES;
            const u32 there = inside ? rows - row0 : 0;  // rows that have it
            const u8* from = plane + at((row0 + r) * units + u0) + c * 16;
            const i64 stride = at(PASS * units);
#pragma unroll
            for (u32 k = 0; k < ROWS; k += PASS) {
                const u32 place = PASS % 2 ? chunk(r + k, c) : chunk(r, c);
                const u32 word = to + (r * CHUNKS + place + k * CHUNKS) * 16;
                if (!EARLY) copy_async(word, from, r + k < there);
                else if (r + k < there) prefetch(from);
                from += stride;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < (ROWS * CHUNKS + THREADS - 1) / THREADS; k++) {
                const u32 i = threadIdx.x + k * THREADS, r = i / CHUNKS, c = i % CHUNKS;
                if (ROWS * CHUNKS % THREADS && i >= ROWS * CHUNKS) break;
                const u32 first = (row0 + r) * units;
                const i64 from = (at(first + u0) & -16) + c * 16;
                const bool there = row0 + r < rows && from < at(first + last) + BYTES;
                if (!EARLY) copy_async(to + (r * CHUNKS + chunk(r, c)) * 16, plane + from, there);
                else if (there) prefetch(plane + from);
            }
        }
    }
};

// The planes of a type one after the other, in the tensor and in a stage.
template <class W, int P = 0>
struct Stage {
    static constexpr int SIZE = Plane<W, P>::SIZE + Stage<W, P + 1>::SIZE;
    template <bool EARLY>
    static DEVICE void request(u32 to, const u8* plane, u32 units, u32 row0, u32 rows, u32 u0) {
        using First = Plane<W, P>;
        using Rest = Stage<W, P + 1>;
        First::template request<EARLY>(to, plane, units, row0, rows, u0);
        Rest::template request<EARLY>(to + First::SIZE, plane + First::at(rows * units), units,
                                      row0, rows, u0);
    }
};
template <class W>
struct Stage<W, Planes<W>::count> {
    static constexpr int SIZE = 0;
    template <bool EARLY>
    static DEVICE void request(u32, const u8*, u32, u32, u32, u32) {}
};

template <class W, int P>
constexpr int plane_offset() {
    if constexpr (P == 0) return 0;
    else return plane_offset<W, P - 1>() + Plane<W, P - 1>::SIZE;
}

// Where a stage has unit `unit` of row `row`; `first` is the unit of the tensor that the row's part
// begins with.
template <class W>
struct At {
    const u8* stage;
    u32 row, unit, first;

    template <int P, int HALF = 0>
    DEVICE const u8* word() const {
        using T = Plane<W, P>;
        const u8* part = stage + plane_offset<W, P>() + row * (T::CHUNKS * 16);
        if constexpr (T::PER == 1 && T::BYTES % 16 == 0)
            return part + T::chunk(row, unit * (T::BYTES / 16) + HALF) * 16;
        else if constexpr (T::ALIGN == 16)
            return part + unit / T::PER * T::BYTES;
        else
            return part + (u32(T::at(first)) & 15) + u32(T::at(first + unit) - T::at(first));
    }
};
