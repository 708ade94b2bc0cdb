//! `#[derive(Hint)]`: what a user can do about an error stands beside its message.
//!
//! A variant (or a struct) with `#[hint("…", arguments)]` has that hint, formatted as `#[error]` formats the message: with its fields by
//! their names, those of a tuple as `_0`, `_1`. With any other `#[hint(expression)]` it has the `Option<String>` that this gives, without
//! the attribute none. The trait is `lockstep_ir::Hint`, and this derive is used from there.
#![forbid(unsafe_code)]

use proc_macro2::{TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::{Attribute, Data, DeriveInput, Error, Fields, Member};

/// Implements `lockstep_ir::Hint` by the `#[hint]` attributes of an error.
#[proc_macro_derive(Hint, attributes(hint))]
pub fn derive_hint(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    implementation(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn implementation(input: &DeriveInput) -> Result<TokenStream, Error> {
    let name = &input.ident;
    let arms = match &input.data {
        Data::Struct(data) => vec![arm(quote!(Self), &data.fields, &input.attrs)?],
        Data::Enum(data) => {
            let arm = |v: &syn::Variant| {
                let name = &v.ident;
                arm(quote!(Self::#name), &v.fields, &v.attrs)
            };
            data.variants.iter().map(arm).collect::<Result<_, _>>()?
        }
        Data::Union(_) => return Err(Error::new_spanned(name, "a union has no hint")),
    };
    Ok(quote! {
        impl ::lockstep_ir::Hint for #name {
            #[allow(unused_imports, unused_variables)]
            fn hint(&self) -> ::core::option::Option<::std::string::String> {
                use ::lockstep_ir::Hint as _;
                match self { #(#arms)* }
            }
        }
    })
}

fn arm(path: TokenStream, fields: &Fields, attributes: &[Attribute]) -> Result<TokenStream, Error> {
    let Some(attribute) = attributes.iter().find(|a| a.path().is_ident("hint")) else {
        return Ok(quote!(#path { .. } => None,));
    };
    let told = &attribute.meta.require_list()?.tokens;
    let hint = match told.clone().into_iter().next() {
        Some(TokenTree::Literal(_)) => quote!(Some(format!(#told))),
        _ => told.clone(),
    };
    let bound = fields.members().map(|member| match member {
        Member::Named(name) => quote!(#name),
        Member::Unnamed(index) => {
            let name = format_ident!("_{}", index.index);
            quote!(#index: #name)
        }
    });
    Ok(quote!(#path { #(#bound),* } => #hint,))
}
