"""The Helm chart, rendered by Helm and held against Kubernetes' schemas; `make helm-check`."""
