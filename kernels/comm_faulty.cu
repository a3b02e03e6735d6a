// The collectives of comm.cu with faults that tests and doctor plant: words to a peer dropped, zeroed, flipped, or late
// (CommRanks::fault). Kernels of their own, so that those in use have no branches for it.
#include "comm.cuh"

COLLECTIVE(all_reduce_push_faulty, AllReduceParams, 256) { push<true>(p); }
COLLECTIVE(all_reduce_pull_faulty, AllReduceParams, 256) { pull<true>(p); }
COLLECTIVE(all_reduce_two_shot_faulty, AllReduceParams, 256, 2) { two_shot<true>(p); }
COLLECTIVE(exchange_words_faulty, ExchangeParams, 256) { exchange<true>(p); }
COLLECTIVE(peer_ping_faulty, PeerParams, 32) { ping<true>(p); }
KERNEL(peer_store_faulty, PeerParams, 256) { store_pattern<true>(p); }
KERNEL(peer_load_faulty, PeerParams, 256) { load_pattern<true>(p); }
