// What kernels need that use Hopper's copy engine and tensor cores: barriers, copies, products of tiles.

struct alignas(64) TensorMap {
    u64 words[16];
};

struct TensorMaps {
    TensorMap from, to;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DEV static __device__ __forceinline__

DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV void barrier_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void barrier_expect(u32 b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void barrier_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
// Of the same barrier in a block of the cluster.
DEV void barrier_arrive_at(u32 b, u32 block) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(b),
                 "r"(block)
                 : "memory");
}
DEV void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV void barrier_wait(u32 b, u32 parity) {
    asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(b),
                 "r"(parity)
                 : "memory");
}
DEV void load_box(u32 to, const TensorMap *map, int x, int y, u32 b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(b)
                 : "memory");
}
// The same for both blocks of a cluster: their memory, and their barriers.
DEV void load_box_for_both(u32 to, const TensorMap *map, int x, int y, u32 b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
                 "[%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(b), "h"((u16)3)
                 : "memory");
}
// 16 bytes, or zeros.
DEV void load_pack(u32 to, const u8 *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Tells the barrier when all that this thread has asked for so far is there.
DEV void loads_arrive(u32 b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory");
}
// Of a tile with swizzled rows of 128 bytes.
DEV u64 describe(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32) | ((u64)1 << 62);
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEV void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
DEV void group_barrier(int which) { asm volatile("bar.sync %0, 128;" ::"r"(1 + which) : "memory"); }

#define R8(a, i)                                                                                                       \
    "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), "+f"(a[i + 6]),        \
        "+f"(a[i + 7])
#define R128                                                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
    "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
    "%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"   \
    "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"   \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#endif
