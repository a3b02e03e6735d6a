// The collectives between ranks, and what probes a pair of GPUs: comm.cuh says how they work.
#include "comm.cuh"

COLLECTIVE(all_reduce_push, AllReduceParams, 256) { push<false>(p); }
COLLECTIVE(all_reduce_pull, AllReduceParams, 256) { pull<false>(p); }
COLLECTIVE(all_reduce_two_shot, AllReduceParams, 256, 2) {
  two_shot<false>(p);
}  // without the 2, ptxas holds it at 80 registers and spills
COLLECTIVE(exchange_words, ExchangeParams, 256) { exchange<false>(p); }
COLLECTIVE(peer_ping, PeerParams, 32) { ping<false>(p); }
KERNEL(all_reduce_local, AllReduceParams, 256) { local(p); }
KERNEL(all_reduce_timed, AllReduceParams, 256) { timed(p); }
KERNEL(peer_store, PeerParams, 256) { store_pattern<false>(p); }
KERNEL(peer_load, PeerParams, 256) { load_pattern<false>(p); }
