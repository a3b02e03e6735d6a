//! n-gram drafting (prompt lookup): what followed the last time the text ended like this.
//!
//! The reference arm of the search that kernels/draft.cu does on the device.

/// Shortest and longest suffix that is looked for, in tokens. Below 3 a match says little: most drafts would be wrong.
pub const MIN_NGRAM: usize = 3;
pub const MAX_NGRAM: usize = 8;

/// A match: how many tokens of the suffix were found, and what followed them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub length: usize,
    pub drafts: Vec<u32>,
}

/// Up to `k` drafts for the token after `history`: the continuation of the longest suffix (MIN_NGRAM to MAX_NGRAM
/// tokens) that stands earlier in it; of equally long ones the most recent. Without a match there are no drafts.
pub fn search(history: &[u32], k: usize) -> Match {
    let n = history.len();
    let mut best = Match::default();
    // `end` is the index of the token after the earlier occurrence.
    for end in (1..n).rev() {
        let length = (0..MAX_NGRAM.min(end)).take_while(|&i| history[end - 1 - i] == history[n - 1 - i]).count();
        if length > best.length && length >= MIN_NGRAM {
            best = Match { length, drafts: history[end..n.min(end + k)].to_vec() };
            if length == MAX_NGRAM {
                break;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(history: &[u32], k: usize, length: usize, drafts: &[u32]) {
        assert_eq!(search(history, k), Match { length, drafts: drafts.to_vec() });
    }

    #[test]
    fn longest_suffix_then_most_recent() {
        check(&[1, 2, 3, 9, 1, 2, 3], 2, 3, &[9, 1]);
        // Two matches of three tokens: the later one.
        check(&[1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1, 3, &[9]);
        // The longer match wins although it is older.
        check(&[7, 1, 2, 3, 8, 1, 2, 3, 9, 7, 1, 2, 3], 1, 4, &[8]);
    }

    #[test]
    fn short_matches_and_short_histories_give_nothing() {
        check(&[1, 2, 9, 1, 2], 3, 0, &[]);
        check(&[], 3, 0, &[]);
        check(&[5], 3, 0, &[]);
    }

    #[test]
    fn a_loop_drafts_itself() {
        check(&[4, 4, 4, 4, 4], 3, 4, &[4]);
        check(&[1, 2, 1, 2, 1, 2, 1, 2], 4, 6, &[1, 2]);
    }
}
