//! Every kernel of kernels/*.cu by name.

macro_rules! kernels {
    ($($id:ident $name:literal $params:literal $threads:literal $shared:literal)*) => {
        /// A KERNEL row of kernels/*.cu.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum KernelId { $($id),* }

        impl KernelId {
            pub const ALL: &'static [KernelId] = &[$(KernelId::$id),*];

            pub fn name(self) -> &'static str {
                match self { $(KernelId::$id => $name),* }
            }

            /// Threads of a block.
            pub fn threads(self) -> u32 {
                match self { $(KernelId::$id => $threads),* }
            }

            /// Dynamic shared memory of a block, in bytes.
            pub fn shared(self) -> u32 {
                match self { $(KernelId::$id => $shared),* }
            }

            /// Name of its params struct.
            pub fn params(self) -> &'static str {
                match self { $(KernelId::$id => $params),* }
            }

            pub fn of(name: &str) -> Option<KernelId> {
                KernelId::ALL.iter().copied().find(|id| id.name() == name)
            }
        }
    };
}

kernels! {
    AttentionDecode6416 "attention_decode_64_16" "AttentionParams" 256 0
    AttentionDecode6432 "attention_decode_64_32" "AttentionParams" 256 0
    AttentionDecode12816 "attention_decode_128_16" "AttentionParams" 256 0
    AttentionDecode12832 "attention_decode_128_32" "AttentionParams" 256 0
    AttentionRope64 "attention_rope_64" "AttentionParams" 256 0
    AttentionRope128 "attention_rope_128" "AttentionParams" 256 0
    AttentionPrefill64 "attention_prefill_64" "AttentionParams" 128 0
    AttentionPrefill128 "attention_prefill_128" "AttentionParams" 128 0
    AllReducePush "all_reduce_push" "AllReduceParams" 256 0
    AllReducePull "all_reduce_pull" "AllReduceParams" 256 0
    AllReduceTwoShot "all_reduce_two_shot" "AllReduceParams" 256 0
    ExchangeWords "exchange_words" "ExchangeParams" 256 0
    PeerPing "peer_ping" "PeerParams" 32 0
    AllReduceLocal "all_reduce_local" "AllReduceParams" 256 0
    AllReduceTimed "all_reduce_timed" "AllReduceParams" 256 0
    PeerStore "peer_store" "PeerParams" 256 0
    PeerLoad "peer_load" "PeerParams" 256 0
    AllReducePushFaulty "all_reduce_push_faulty" "AllReduceParams" 256 0
    AllReducePullFaulty "all_reduce_pull_faulty" "AllReduceParams" 256 0
    AllReduceTwoShotFaulty "all_reduce_two_shot_faulty" "AllReduceParams" 256 0
    ExchangeWordsFaulty "exchange_words_faulty" "ExchangeParams" 256 0
    PeerPingFaulty "peer_ping_faulty" "PeerParams" 32 0
    PeerStoreFaulty "peer_store_faulty" "PeerParams" 256 0
    PeerLoadFaulty "peer_load_faulty" "PeerParams" 256 0
    CopyRows "copy_rows" "CopyParams" 128 0
    DraftChoose "draft_choose" "DraftParams" 256 0
    NgramDraft "ngram_draft" "NgramParams" 256 0
    DraftBegin "draft_begin" "DraftBeginParams" 32 0
    Embed "embed" "EmbedParams" 128 0
    ExpertsUpM8Bf16Bf16 "experts_up_m8_bf16_bf16" "ExpertParams" 512 0
    ExpertsUpM16Bf16Bf16 "experts_up_m16_bf16_bf16" "ExpertParams" 512 0
    ExpertsDownM8Bf16Bf16 "experts_down_m8_bf16_bf16" "ExpertParams" 512 0
    ExpertsDownM16Bf16Bf16 "experts_down_m16_bf16_bf16" "ExpertParams" 512 0
    ExpertsUpM8Fp8Fp8 "experts_up_m8_fp8_fp8" "ExpertParams" 512 0
    ExpertsUpM16Fp8Fp8 "experts_up_m16_fp8_fp8" "ExpertParams" 512 0
    ExpertsDownM8Fp8Fp8 "experts_down_m8_fp8_fp8" "ExpertParams" 512 0
    ExpertsDownM16Fp8Fp8 "experts_down_m16_fp8_fp8" "ExpertParams" 512 0
    ExpertsUpM8Fp8RowsFp8Rows "experts_up_m8_fp8_rows_fp8_rows" "ExpertParams" 512 0
    ExpertsUpM16Fp8RowsFp8Rows "experts_up_m16_fp8_rows_fp8_rows" "ExpertParams" 512 0
    ExpertsDownM8Fp8RowsFp8Rows "experts_down_m8_fp8_rows_fp8_rows" "ExpertParams" 512 0
    ExpertsDownM16Fp8RowsFp8Rows "experts_down_m16_fp8_rows_fp8_rows" "ExpertParams" 512 0
    ExpertsUpM8Int4Bf16 "experts_up_m8_int4_bf16" "ExpertParams" 512 0
    ExpertsUpM16Int4Bf16 "experts_up_m16_int4_bf16" "ExpertParams" 512 0
    ExpertsDownM8Int4Bf16 "experts_down_m8_int4_bf16" "ExpertParams" 512 0
    ExpertsDownM16Int4Bf16 "experts_down_m16_int4_bf16" "ExpertParams" 512 0
    ExpertsUpM8Int4Fp8 "experts_up_m8_int4_fp8" "ExpertParams" 512 0
    ExpertsUpM16Int4Fp8 "experts_up_m16_int4_fp8" "ExpertParams" 512 0
    ExpertsDownM8Int4Fp8 "experts_down_m8_int4_fp8" "ExpertParams" 512 0
    ExpertsDownM16Int4Fp8 "experts_down_m16_int4_fp8" "ExpertParams" 512 0
    LinearM8 "linear_m8" "LinearParams" 256 0
    LinearM16 "linear_m16" "LinearParams" 256 0
    LinearTwo "linear_two" "LinearParams" 256 0
    LinearM8Fp8 "linear_m8_fp8" "LinearParams" 256 0
    LinearM16Fp8 "linear_m16_fp8" "LinearParams" 256 0
    LinearM8Fp8Rows "linear_m8_fp8_rows" "LinearParams" 256 0
    LinearM16Fp8Rows "linear_m16_fp8_rows" "LinearParams" 256 0
    LinearM8Int4 "linear_m8_int4" "LinearParams" 256 0
    LinearM16Int4 "linear_m16_int4" "LinearParams" 256 0
    LinearPrefill128x128 "linear_prefill_128x128" "LinearParams" 256 98304
    LinearPrefill64x64 "linear_prefill_64x64" "LinearParams" 128 98304
    LinearPrefill64x64Two "linear_prefill_64x64_two" "LinearParams" 128 98304
    LatentQuery "latent_query" "LatentParams" 256 0
    LatentAttend51264 "latent_attend_512_64" "LatentParams" 256 0
    LatentAttend12816 "latent_attend_128_16" "LatentParams" 256 0
    LatentAttend6432 "latent_attend_64_32" "LatentParams" 256 0
    LatentAttend328 "latent_attend_32_8" "LatentParams" 256 0
    LatentValue512 "latent_value_512" "LatentParams" 256 0
    LatentValue128 "latent_value_128" "LatentParams" 256 0
    LatentValue64 "latent_value_64" "LatentParams" 256 0
    LatentValue32 "latent_value_32" "LatentParams" 256 0
    NormRows "norm_rows" "NormParams" 256 0
    NormRowsBf16 "norm_rows_bf16" "NormParams" 256 0
    NormStep "norm_step" "NormParams" 256 0
    NormStepBf16 "norm_step_bf16" "NormParams" 256 0
    NormStepBf16Stream "norm_step_bf16_stream" "NormParams" 256 0
    ReadCeiling "read_ceiling" "ReadParams" 512 0
    Repack "repack" "RepackParams" 256 0
    RepackFp8 "repack_fp8" "RepackCodesParams" 256 0
    RepackInt4 "repack_int4" "RepackCodesParams" 256 0
    QuantiseFp8 "quantise_fp8" "RepackParams" 256 0
    FillRandom "fill_random" "FillParams" 256 0
    FillCodes "fill_codes" "FillCodesParams" 256 0
    RouterM8 "router_m8" "RouterParams" 512 0
    RouterM16 "router_m16" "RouterParams" 512 0
    SampleAdjust "sample_adjust" "SampleParams" 256 0
    SampleCount "sample_count" "SampleParams" 256 0
    SampleChoose "sample_choose" "SampleParams" 256 0
    SampleNarrow "sample_narrow" "SampleParams" 256 0
    SampleSettle "sample_settle" "SampleParams" 256 0
    SampleAccept "sample_accept" "SampleParams" 256 0
    PrefillAdvance "prefill_advance" "AdvanceParams" 32 0
}
