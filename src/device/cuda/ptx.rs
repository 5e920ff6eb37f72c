//! How many parameters the kernels of a PTX text have.
//!
//! The driver is asked for a parameter by its number, and says that there is none by failing: a tool that watches the driver's calls
//! reports that. With the count from the text, no call has to fail.

use std::collections::HashMap;

/// The kernels that a text defines or declares, and how many parameters each has.
pub(super) fn parameters(ptx: &str) -> HashMap<Box<str>, usize> {
    let text = without_comments(ptx);
    let mut all = HashMap::new();
    let mut rest = &*text;
    while let Some(at) = find_word(rest, ".entry") {
        rest = rest[at + ".entry".len()..].trim_start();
        let end = rest
            .find(|c: char| c.is_whitespace() || matches!(c, '(' | '{' | ';'))
            .unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        rest = after.trim_start();
        // Without a list there is no parameter.
        let list = rest.strip_prefix('(').and_then(|list| list.split_once(')'));
        let mut count = 0;
        if let Some((mut list, after)) = list {
            rest = after;
            while let Some(at) = find_word(list, ".param") {
                count += 1;
                list = &list[at + ".param".len()..];
            }
        }
        all.insert(name.into(), count);
    }
    all
}

/// Where a directive is, as a whole word.
fn find_word(text: &str, word: &str) -> Option<usize> {
    let inside = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%');
    text.match_indices(word)
        .map(|(at, _)| at)
        .find(|at| !text[at + word.len()..].starts_with(inside))
}

/// The text with blanks for comments and for what stands in quotes.
fn without_comments(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(at) = rest.find(['/', '"']) {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(comment) = rest.strip_prefix("/*") {
            comment.find("*/").map_or(rest.len(), |end| end + 4)
        } else if let Some(quoted) = rest.strip_prefix('"') {
            quoted.find('"').map_or(rest.len(), |end| end + 2)
        } else {
            1
        };
        text.push(' ');
        rest = &rest[skipped..];
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted() {
        let ptx = r#"
            // .entry commented_out(.param .u64 a)
            .version 8.0
            .target sm_70
            .address_size 64
            .file 1 "a .entry quoted(.param .u64 a) // in here"
            /* .entry also_commented() */
            .visible .entry three(
                .param .u64 three_param_0,          // .param .u64 not this
                .param .align 8 .b8 three_param_1[4096],
                .param .u64 .ptr .global .align 4 three_param_2
            )
            .maxntid 256, 1, 1
            { ld.param.u64 %rd1, [three_param_0]; ret; }
            .entry none() { ret; }
            .weak .entry bare { ret; }
            .func (.param .b32 out) helper(.param .b32 in) { ret; }
            .entry $odd_name(.param .f32 x){ ret; }
        "#;
        let all = parameters(ptx);
        let mut all: Vec<_> = all.iter().map(|(name, count)| (&**name, *count)).collect();
        all.sort_unstable();
        assert_eq!(
            all,
            [("$odd_name", 1), ("bare", 0), ("none", 0), ("three", 3)]
        );
        assert!(parameters("").is_empty());
        assert!(
            parameters(".entry").len() == 1,
            "and nothing is indexed out of bounds"
        );
    }
}
