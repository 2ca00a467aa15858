"""The contracts: .proto files and the code generated from them."""
