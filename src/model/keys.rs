//! A JSON object read strictly: every key is taken once, typed and within limits, and what nobody took is refused. Keys
//! that say nothing about the arithmetic, in any config of these families, are listed here.
use anyhow::{bail, Context, Result};
use serde_json::{Map, Value};

/// A JSON object whose keys are taken out as they are read, so that the rest are those that nobody read.
pub(super) struct Keys {
    pub map: Map<String, Value>,
    /// What errors put before the key.
    pub path: String,
}

impl Keys {
    pub fn parse(json: &str, file: &str) -> Result<Keys> {
        match serde_json::from_str(json).with_context(|| format!("{file}: expected JSON"))? {
            Value::Object(map) => Ok(Keys { map, path: format!("{file}: ") }),
            _ => bail!("{file}: expected a JSON object, found another kind of value"),
        }
    }

    /// Null is absent, as in transformers.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|value| !value.is_null())
    }

    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => bail!("{}{key}: expected true or false, found {other}", self.path),
        }
    }

    /// A whole number from 1 to `max`.
    pub fn count(&mut self, key: &str, max: usize) -> Result<usize> {
        self.optional_count(key, max)?
            .with_context(|| format!("{}{key}: expected a number from 1 to {max}, found none", self.path))
    }

    pub fn optional_count(&mut self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(n) if (1..=max as u64).contains(&n) => Ok(Some(n as usize)),
            _ => bail!("{}{key}: expected a number from 1 to {max}, found {value}", self.path),
        }
    }

    /// A whole number from 0 to `max`.
    pub fn optional_whole(&mut self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_u64().filter(|n| *n <= max as u64) {
            Some(n) => Ok(Some(n as usize)),
            None => bail!("{}{key}: expected a number from 0 to {max}, found {value}", self.path),
        }
    }

    pub fn optional_number(&mut self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => bail!("{}{key}: expected a number, found {value}", self.path),
        }
    }

    /// A number above 0 and up to `max`.
    pub fn positive(&mut self, key: &str, max: f64) -> Result<f64> {
        self.optional_positive(key, max)?
            .with_context(|| format!("{}{key}: expected a number above 0 and up to {max}, found none", self.path))
    }

    pub fn optional_positive(&mut self, key: &str, max: f64) -> Result<Option<f64>> {
        match self.optional_number(key)? {
            Some(number) if !(number > 0.0 && number <= max) => {
                bail!("{}{key}: expected a number above 0 and up to {max}, found {number}", self.path)
            }
            number => Ok(number),
        }
    }

    /// A token id or a list of them; absent is an empty list.
    pub fn ids(&mut self, key: &str) -> Result<Vec<u64>> {
        let values = match self.take(key) {
            None => vec![],
            Some(Value::Array(values)) => values,
            Some(value) => vec![value],
        };
        let id = |value: &Value| {
            value
                .as_u64()
                .with_context(|| format!("{}{key}: expected a token id or a list of them, found {value}", self.path))
        };
        values.iter().map(id).collect()
    }

    /// What is left was not read. Null says nothing in transformers; anything else might change the arithmetic.
    pub fn refuse_unread(self, is_harmless: impl Fn(&str, &Value) -> bool) -> Result<()> {
        let Some((key, value)) = self.map.iter().find(|(key, value)| !value.is_null() && !is_harmless(key, value))
        else {
            return Ok(());
        };
        let shown: String = value.to_string().chars().take(60).collect();
        bail!(
            "{}{key}: found {shown}, a setting that is not implemented here and may change the arithmetic; remove the key if it only describes",
            self.path
        )
    }
}

/// Keys that say nothing about the forward pass of these families: training, text, provenance, and the generation and
/// task defaults that transformers 4 wrote into every config.
pub(super) fn is_descriptive(key: &str) -> bool {
    const PREFIXES: [&str; 3] = ["_", "transformers", "unsloth_"];
    PREFIXES.iter().any(|prefix| key.starts_with(prefix)) || DESCRIPTIVE.contains(&key)
}

#[rustfmt::skip]
const DESCRIPTIVE: &[&str] = &[
    // training and numerics; the dtype is that of each tensor, and pretraining_tp only ordered the sums of a linear
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout", "initializer_range", "dtype",
    "torch_dtype", "use_cache", "pretraining_tp", "gradient_checkpointing",
    "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits", "ep_size",
    // text and provenance
    "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "tokenizer_class", "prefix", "name_or_path", "license",
    "is_llama_config", "model_max_length", "max_sequence_length", "finetuning_task", "task_specific_params", "problem_type", "id2label",
    "label2id", "num_labels", "torchscript", "return_dict", "output_attentions", "output_hidden_states", "use_bfloat16", "tf_legacy_loss",
    "chunk_size_feed_forward", "decoder_start_token_id", "is_decoder",
    // generation defaults
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
];

/// Keys that are understood at one value only: the one that changes nothing.
pub(super) fn is_neutral(key: &str, value: &Value) -> bool {
    match key {
        "attention_bias" | "mlp_bias" | "bias" | "use_qk_norm" | "rope_interleaved" | "use_mrope" => *value == false,
        "is_encoder_decoder" | "add_cross_attention" | "tie_encoder_decoder" => *value == false,
        "partial_rotary_factor" => value.as_f64() == Some(1.0),
        "pruned_heads" => value.as_object().is_some_and(Map::is_empty),
        _ => false,
    }
}
