//! Why a run did not replay: the answers of the one decision there is (see [`decide`](super::decide)).

use std::fmt;

use super::admit::Mismatch;

/// Why a run warmed up, recorded, or ran eagerly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Warmup: the key was not run before, or asked for more warmup.
    NotWarm,
    /// Warmup: the last run was one, and addresses below it are not final.
    BelowWarmup,
    /// Recorded: the function has no recording at this place of the tree.
    FirstRecording,
    /// Recorded: what is recorded at this place does not fit. This is what differs from the last of it.
    Changed(Mismatch),
    /// Eager: captures of the key failed, and the next is not tried yet.
    CaptureFailed,
    /// Eager: the key is none of those that are captured.
    KeyNotCaptured,
    /// Eager: the key's graph was too small to be worth a launch.
    GraphTooSmall,
    /// Eager: the closure said that it does what cannot be captured.
    NotCapturable,
    /// Eager: the closure did not want the recording kept.
    Discarded,
    /// Eager: the function has as many recordings as it may have.
    RecordingLimit,
    /// Eager: the function has as many recordings at this place as it may have.
    PlaceLimit,
    /// Eager: the tree has as many graphs as it may have, and all of them are in use.
    GraphBudget,
    /// Eager: the function writes to this input, which would be a copy.
    InputMutated(usize),
    /// Eager: an input moved, and the function's policy is to run eagerly then.
    InputMoved(Mismatch),
    /// Eager: the function is skipped at this place from now on, by its policy for inputs that move.
    Skipped,
}

/// The kinds of [`Reason`]s, to count and to choose them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // each is the reason of the same name
#[non_exhaustive]
pub enum ReasonKind {
    NotWarm,
    BelowWarmup,
    FirstRecording,
    Changed,
    CaptureFailed,
    KeyNotCaptured,
    GraphTooSmall,
    NotCapturable,
    Discarded,
    RecordingLimit,
    PlaceLimit,
    GraphBudget,
    InputMutated,
    InputMoved,
    Skipped,
}

impl ReasonKind {
    /// All of them, in order.
    pub const ALL: [ReasonKind; 15] = [
        ReasonKind::NotWarm,
        ReasonKind::BelowWarmup,
        ReasonKind::FirstRecording,
        ReasonKind::Changed,
        ReasonKind::CaptureFailed,
        ReasonKind::KeyNotCaptured,
        ReasonKind::GraphTooSmall,
        ReasonKind::NotCapturable,
        ReasonKind::Discarded,
        ReasonKind::RecordingLimit,
        ReasonKind::PlaceLimit,
        ReasonKind::GraphBudget,
        ReasonKind::InputMutated,
        ReasonKind::InputMoved,
        ReasonKind::Skipped,
    ];

    /// The kinds of eager runs: what [`GraphTrees::refuse`](crate::GraphTrees::refuse) takes to make a fallback an error.
    pub const EAGER: &'static [ReasonKind] = &[
        ReasonKind::CaptureFailed,
        ReasonKind::KeyNotCaptured,
        ReasonKind::GraphTooSmall,
        ReasonKind::NotCapturable,
        ReasonKind::Discarded,
        ReasonKind::RecordingLimit,
        ReasonKind::PlaceLimit,
        ReasonKind::GraphBudget,
        ReasonKind::InputMutated,
        ReasonKind::InputMoved,
        ReasonKind::Skipped,
    ];

    pub(super) fn bit(self) -> u16 {
        1 << self as u16
    }
}

impl Reason {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> ReasonKind {
        match self {
            Reason::NotWarm => ReasonKind::NotWarm,
            Reason::BelowWarmup => ReasonKind::BelowWarmup,
            Reason::FirstRecording => ReasonKind::FirstRecording,
            Reason::Changed(_) => ReasonKind::Changed,
            Reason::CaptureFailed => ReasonKind::CaptureFailed,
            Reason::KeyNotCaptured => ReasonKind::KeyNotCaptured,
            Reason::GraphTooSmall => ReasonKind::GraphTooSmall,
            Reason::NotCapturable => ReasonKind::NotCapturable,
            Reason::Discarded => ReasonKind::Discarded,
            Reason::RecordingLimit => ReasonKind::RecordingLimit,
            Reason::PlaceLimit => ReasonKind::PlaceLimit,
            Reason::GraphBudget => ReasonKind::GraphBudget,
            Reason::InputMutated(_) => ReasonKind::InputMutated,
            Reason::InputMoved(_) => ReasonKind::InputMoved,
            Reason::Skipped => ReasonKind::Skipped,
        }
    }

    /// What to do about it, where something is likely to be wanted.
    pub(super) fn advice(&self) -> Option<&'static str> {
        Some(match self {
            Reason::CaptureFailed => "see GraphTrees::last_failure for what the capture refused",
            Reason::NotCapturable => {
                "split the function there: what comes before and after can be captured"
            }
            Reason::RecordingLimit => {
                "group inputs of different lengths under fewer keys (pad them), or raise max_recordings"
            }
            Reason::PlaceLimit => {
                "an input that moves at each call is better copied (not static), or raise max_recordings_at_a_place"
            }
            Reason::GraphBudget => "raise the budget, or let go of outputs between steps",
            Reason::InputMutated(_) => {
                "declare the input static and pass it at one address, or return the new value as an output"
            }
            Reason::InputMoved(_) | Reason::Skipped => {
                "keep the input at one address, or let it be copied (OnMove::Copy)"
            }
            Reason::NotWarm
            | Reason::BelowWarmup
            | Reason::FirstRecording
            | Reason::Changed(_)
            | Reason::KeyNotCaptured
            | Reason::GraphTooSmall
            | Reason::Discarded => return None,
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::NotWarm => f.write_str("the key is not warm"),
            Reason::BelowWarmup => f.write_str("the last run was a warmup"),
            Reason::FirstRecording => f.write_str("nothing is recorded at this place"),
            Reason::Changed(mismatch) => write!(f, "what is recorded does not fit: {mismatch}"),
            Reason::CaptureFailed => f.write_str("captures failed"),
            Reason::KeyNotCaptured => f.write_str("the key is not one of those to capture"),
            Reason::GraphTooSmall => f.write_str("its graph was too small"),
            Reason::NotCapturable => f.write_str("it does what cannot be captured"),
            Reason::Discarded => f.write_str("its closure did not want the recording kept"),
            Reason::RecordingLimit => {
                f.write_str("the function has all the recordings it may have")
            }
            Reason::PlaceLimit => {
                f.write_str("the function has all the recordings it may have at this place")
            }
            Reason::GraphBudget => f.write_str("the tree has all the graphs it may have"),
            Reason::InputMutated(input) => {
                write!(f, "it writes to input {input}, which would be a copy")
            }
            Reason::InputMoved(mismatch) => write!(f, "an input moved: {mismatch}"),
            Reason::Skipped => f.write_str("it is skipped at this place"),
        }
    }
}

/// How often a function's runs did what, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FunctionReport {
    /// Runs that were replays.
    pub replays: u64,
    /// Its recordings that are there now.
    pub recordings: usize,
    /// How often each reason was the answer, in the order of [`ReasonKind::ALL`]; those that never were are left out.
    pub reasons: Vec<(ReasonKind, u64)>,
}

impl FunctionReport {
    /// How often a reason was the answer.
    #[must_use]
    pub fn count(&self, kind: ReasonKind) -> u64 {
        let found = self.reasons.iter().find(|(k, _)| *k == kind);
        found.map_or(0, |(_, count)| *count)
    }

    /// Runs that were eager.
    #[must_use]
    pub fn eager(&self) -> u64 {
        ReasonKind::EAGER.iter().map(|kind| self.count(*kind)).sum()
    }
}

/// Said once for each function and kind of reason, when it is first run eagerly for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The function's name.
    pub function: String,
    /// Why it ran eagerly.
    pub reason: Reason,
    /// One line: what holds, and what to do.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_numbered_in_order() {
        for (index, kind) in ReasonKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
        let eager: Vec<_> = ReasonKind::ALL.into_iter().skip(4).collect();
        assert_eq!(ReasonKind::EAGER, eager);
    }
}
