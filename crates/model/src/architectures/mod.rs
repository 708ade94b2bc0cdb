//! The architectures, a file each. Which there are is the list of `lockstep_config::architectures!`: a line there and a file here
//! are all of a new one.

use crate::ModelBuilder;
use lockstep_config::Architecture;

macro_rules! choose {
    ($($Variant:ident = $word:literal, $file:ident, $features:expr;)+) => {
        $(mod $file;)+

        /// What writes down the forward graph of an architecture.
        pub(crate) fn builder(architecture: Architecture) -> ModelBuilder {
            match architecture {
                $(Architecture::$Variant => $file::build,)+
            }
        }
    };
}

lockstep_config::architectures!(choose);
